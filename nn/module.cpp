// Implements Module, Parameter and Buffer.
#include "nn/module.h"

#include <cxxabi.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>

#include "core/autograd.h"

namespace voxgrad::nn {
namespace {

std::string join(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + '.' + name;
}

void collect_modules(Module& module, const std::string& prefix, NamedModules& found) {
  found.emplace_back(prefix, &module);
  for (const Member& member : module.members())
    if (member.module) collect_modules(*member.module, join(prefix, member.name), found);
}

Tensors without_repetition(const NamedTensors& named) {
  Tensors tensors;
  std::set<const TensorBody*> seen;
  for (const auto& [name, tensor] : named)
    if (seen.insert(tensor.body().get()).second) tensors.push_back(tensor);
  return tensors;
}

/// Returns whether `given` can be copied to `own`.
bool fits(const Tensor& own, const Tensor& given) {
  return own.shape() == given.shape() &&
         (own.dtype() == given.dtype() || (is_floating(own.dtype()) && is_floating(given.dtype())));
}

/// Returns a message that lists the differences between a module's state and a given state.
std::string explain(const LoadReport& report, const TensorMap& own, const TensorMap& given) {
  std::ostringstream text;
  const char* separator = "";
  const auto list = [&](const char* title, const std::vector<std::string>& names, const auto& describe_name) {
    if (names.empty()) return;
    text << separator << title << ' ';
    for (size_t i = 0; i < names.size(); ++i) text << (i ? ", " : "") << describe_name(names[i]);
    separator = "; ";
  };
  const auto plain = [](const std::string& name) { return name; };
  list("missing", report.missing, plain);
  list("unexpected", report.unexpected, plain);
  list("mismatched", report.mismatched, [&](const std::string& name) {
    const Tensor &expected = own.at(name), &got = given.at(name);
    return concat(name, " (module ", expected.shape(), ' ', expected.dtype(), ", state_dict ",
                  got.defined() ? concat(got.shape(), ' ', got.dtype()) : "undefined", ')');
  });
  return text.str();
}

/// An existing Module, Parameter or Buffer. Exactly one of the two pointers is not null.
struct Recorded {
  const Module* module;
  const Tensor* tensor;
};
/// All existing modules, parameters and buffers by address.
struct Addresses {
  std::mutex mutex;
  std::map<const void*, Recorded, std::less<>> objects;
};
Addresses& addresses() {
  static auto* const all = new Addresses;  // never destroyed, because the destructors of static modules use it
  return *all;
}

NamedTensors all_tensors(const Module& module) {
  NamedTensors all = module.named_parameters(), buffers = module.named_buffers();
  all.insert(all.end(), buffers.begin(), buffers.end());
  return all;
}

void print(std::ostream& out, const Module& module, const std::string& indent) {
  const std::string line = detail::summary(module);
  out << line.substr(0, line.size() - 1);
  std::string tensors;
  bool children = false;
  for (const Member& member : const_cast<Module&>(module).members()) {
    if (!member.module) {
      tensors += concat(tensors.empty() ? ": " : ", ", member.name, ' ', member.tensor.shape());
      continue;
    }
    out << '\n' << indent << "  (" << member.name << "): ";
    print(out, *member.module, indent + "  ");
    children = true;
  }
  if (children) out << '\n' << indent;
  out << ')' << tensors;
}

}  // namespace

std::string detail::summary(const Module& module) { return module.class_name() + '(' + module.extra_repr() + ')'; }

void detail::add_address(const Module* module, const Tensor* tensor) {
  const std::lock_guard lock(addresses().mutex);
  addresses().objects[module ? static_cast<const void*>(module) : tensor] = {module, tensor};
}

void detail::remove_address(const void* address) {
  const std::lock_guard lock(addresses().mutex);
  addresses().objects.erase(address);
}

void detail::check_listed(const Module& module, const Bytes& object, std::initializer_list<Bytes> listed,
                          const Members& members) {
  std::vector<Recorded> unlisted;
  {
    const std::lock_guard lock(addresses().mutex);
    const auto& objects = addresses().objects;
    for (auto entry = objects.lower_bound(object.begin); entry != objects.end(); ++entry) {
      const void* const address = entry->first;
      const Recorded& recorded = entry->second;
      if (!object.contains(address)) break;
      const auto holds = [address](const Bytes& bytes) { return bytes.contains(address); };
      if (recorded.module != &module && std::none_of(listed.begin(), listed.end(), holds)) unlisted.push_back(recorded);
    }
  }
  // Objects without state, such as ReLU, need not be listed. Remove these objects first, because visiting all members
  // below is expensive.
  std::erase_if(unlisted, [](const Recorded& part) {
    if (part.tensor) return !part.tensor->defined();
    const auto depends = [](const auto& entry) { return entry.second->depends_on_training(); };
    return all_tensors(*part.module).empty() && std::ranges::none_of(part.module->named_modules(), depends);
  });
  if (unlisted.empty()) return;
  std::set<const void*> known{nullptr};  // all modules and tensor bodies in `members` and below
  for (const Member& member : members) {
    known.insert(member.tensor.body().get());
    if (!member.module) continue;
    for (const auto& [name, tensor] : all_tensors(*member.module)) known.insert(tensor.body().get());
    for (const auto& [name, below] : member.module->named_modules()) known.insert(below);
  }
  for (const auto& [part, own] : unlisted) {
    bool left_out = own && !known.contains(own->body().get());
    for (const auto& [name, tensor] : part ? all_tensors(*part) : NamedTensors())
      left_out = left_out || !known.contains(tensor.body().get());
    for (const auto& [name, below] : part ? part->named_modules() : NamedModules())
      left_out = left_out || (below->depends_on_training() && !known.contains(below));
    check(!left_out, "VG_MODULE", module.class_name(), " does not list its member ",
          part ? summary(*part) : concat("Parameter or Buffer ", describe(*own)),
          ", which would be neither trained nor saved nor moved");
  }
}

std::string detail::module_path(const Module& module) {
  thread_local std::unordered_map<const Module*, std::string> paths;
  const profiler::Name outer = profiler::place().module;
  if (!outer) {
    paths.clear();
    const std::string root = module.class_name();
    for (const auto& [name, below] : module.named_modules())
      paths.emplace(below, name.empty() ? root : join(root, name));
  }
  const auto found = paths.find(&module);
  return found != paths.end() ? found->second : join(outer ? *outer : "", module.class_name());
}

std::string Module::class_name() const {
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(typeid(*this).name(), nullptr, nullptr, nullptr), &std::free);
  std::string name = text ? text.get() : typeid(*this).name();
  const auto last_part = [](const std::string& path) {
    const size_t position = path.rfind("::");
    return position == std::string::npos ? path : path.substr(position + 2);
  };
  if (name.back() != '>') return last_part(name);
  const size_t open = name.find('<');
  const bool axes = open + 3 == name.size() && std::isdigit(static_cast<unsigned char>(name[open + 1]));
  return last_part(name.substr(0, open)) + (axes ? std::string{name[open + 1], 'd'} : "");
}

Parameter::Parameter(const Tensor& tensor) : Tensor(tensor) {
  if (!defined()) return;
  check(is_leaf(), "Parameter", "the result of an operation cannot be a parameter; detach the tensor first");
  requires_grad_();
}

std::ostream& operator<<(std::ostream& out, const Module& module) {
  print(out, module, "");
  int64_t all = 0, trained = 0;
  for (const Tensor& parameter : module.parameters()) {
    all += parameter.numel();
    if (parameter.requires_grad()) trained += parameter.numel();
  }
  return out << '\n'
             << all << (all == 1 ? " parameter" : " parameters")
             << (trained < all ? concat(", ", trained, " of them trained") : "");
}

void detail::check_parameter(const std::string& name, const Tensor& tensor) {
  // A frozen parameter still has autograd data.
  check(tensor.requires_grad() || tensor.body()->autograd, "VG_MODULE", "the Tensor ", name, ", ", describe(tensor),
        ", does not require grad; declare the member as nn::Parameter, or as nn::Buffer if it is not trained");
}

void detail::convert(const std::string& name, const Tensor& tensor, const Conversion& conversion) {
  NoGradGuard no_grad;
  const Tensor old = tensor.detach(), converted = conversion(old);
  if (converted.is_same(old)) return;
  check(tensor.is_leaf(), "to", name, " is the result of a recorded operation; only leaves can be converted in place");
  TensorBody& body = *tensor.body();
  const bool moved = converted.storage() != body.storage;
  while (moved && converted.storage()->version() <= body.storage->version()) converted.storage()->bump_version();
  const Tensor grad = tensor.grad();
  body.storage = converted.storage();
  body.offset = converted.storage_offset();
  body.strides = converted.strides();
  body.dtype = converted.dtype();
  // The old accumulator expects gradients of the old dtype and device.
  if (body.autograd) body.autograd->accumulator.reset();
  if (grad.defined()) convert(name, grad, conversion);
}

NamedModules Module::named_modules() const {
  NamedModules found;
  collect_modules(self(), "", found);
  return found;
}

NamedModules Module::named_children() const {
  NamedModules found;
  for (const Member& member : self().members())
    if (member.module) found.emplace_back(member.name, member.module);
  return found;
}

std::vector<Module*> Module::children() const {
  std::vector<Module*> found;
  for (const auto& [name, module] : named_children()) found.push_back(module);
  return found;
}

NamedTensors Module::named_tensors(bool buffers) const {
  NamedTensors found;
  for (const auto& [prefix, module] : named_modules())
    for (const Member& member : module->members())
      if (!member.module && member.is_buffer == buffers) found.emplace_back(join(prefix, member.name), member.tensor);
  return found;
}

Tensors Module::parameters() const { return without_repetition(named_parameters()); }
Tensors Module::buffers() const { return without_repetition(named_buffers()); }

TensorMap Module::state_dict() const {
  TensorMap state;
  for (const auto& [name, tensor] : all_tensors(*this))
    check(state.emplace(name, tensor.detach()).second, "state_dict", "two members are named ", name);
  return state;
}

LoadReport Module::compare_state_dict(const TensorMap& state) const {
  LoadReport report;
  const TensorMap own = state_dict();
  for (const auto& [name, tensor] : own) {
    const auto entry = state.find(name);
    if (entry == state.end())
      report.missing.push_back(name);
    else if (!entry->second.defined() || !fits(tensor, entry->second))
      report.mismatched.push_back(name);
  }
  for (const auto& [name, tensor] : state)
    if (!own.contains(name)) report.unexpected.push_back(name);
  return report;
}

void Module::check_state_dict(const TensorMap& state) const {
  const LoadReport report = compare_state_dict(state);
  if (!report.matches()) fail("load_state_dict", explain(report, state_dict(), state));
}

LoadReport Module::load_state_dict(const TensorMap& state, bool strict) {
  const LoadReport report = compare_state_dict(state);
  if (strict) check_state_dict(state);
  const TensorMap own = state_dict();
  NoGradGuard no_grad;
  for (const auto& [name, tensor] : own) {
    const auto entry = state.find(name);
    if (entry != state.end() && entry->second.defined() && fits(tensor, entry->second)) tensor.copy_(entry->second);
  }
  return report;
}

void Module::convert(const detail::Conversion& conversion) const {
  for (const auto& [name, tensor] : all_tensors(*this)) detail::convert(name, tensor, conversion);
}

void Module::to(Device device) {
  runtime(device).require(device.index);
  convert([device](const Tensor& t) { return t.to(device); });
}

void Module::to(DType dtype) {
  check(is_floating(dtype), "to", "modules can be converted to floating-point dtypes, not to ", dtype);
  convert([dtype](const Tensor& t) { return is_floating(t.dtype()) ? t.to(dtype) : t; });
}

void Module::to(MemoryFormat format) {
  convert([format](const Tensor& t) { return t.dim() == 4 || t.dim() == 5 ? t.contiguous(format) : t; });
  for (const auto& [name, module] : named_modules()) module->memory_format_ = format;
}

}  // namespace voxgrad::nn
