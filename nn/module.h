// Modules: objects with named parameters, buffers and children.
//
// A module lists its members on request, through the one virtual function that VG_MODULE writes. Constructors register
// nothing with a parent, so a move leaves no dangling pointer. They only record the object's own address, by which
// VG_MODULE notices members that it does not name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "../core/io/safetensors.h"
#include "../core/profiler.h"
#include "../core/tensor.h"
#include "fields.h"

namespace voxgrad::nn {

class Module;

namespace detail {

/// Records the address of a Module, Parameter or Buffer until remove_address(), for check_listed(). Thread-safe.
void add_address(const Module* module, const Tensor* tensor);
void remove_address(const void* address);

/// Base of T, a Tensor, that records the address of each T.
template <class T>
struct Addressed {
  Addressed() { add_address(nullptr, static_cast<const T*>(this)); }
  Addressed(const Addressed&) : Addressed() {}
  Addressed& operator=(const Addressed&) { return *this; }
  ~Addressed() { remove_address(static_cast<const T*>(this)); }
};

}  // namespace detail

/// A tensor that is part of a module's state but is not trained.
struct Buffer : Tensor, detail::Addressed<Buffer> {
  Buffer() = default;
  Buffer(Tensor tensor) : Tensor(std::move(tensor)) {}
};

/// A tensor that is trained: of a Tensor it makes a leaf that requires grad. Other Tensors are parameters if they were
/// made to require grad, as by {.requires_grad = true}; requires_grad_(false) freezes either.
struct Parameter : Tensor, detail::Addressed<Parameter> {
  Parameter() = default;
  Parameter(const Tensor& tensor);
};

namespace detail {

/// A tensor's elements on another device, of another dtype or in another memory format; the tensor itself if they are.
using Conversion = std::function<Tensor(const Tensor&)>;
/// Puts the converted elements of a leaf, and of its gradient, under the same handle. What a live graph saved of the
/// old ones is refused by its version.
void convert(const std::string& name, const Tensor& tensor, const Conversion& conversion);

}  // namespace detail

/// One named thing in a module: a child if `module` is set, else a parameter or a buffer.
struct Member {
  std::string name;
  Tensor tensor;
  bool is_buffer = false;
  Module* module = nullptr;
};
using Members = std::vector<Member>;

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;
using NamedModules = std::vector<std::pair<std::string, Module*>>;

/// Names on which a state_dict and a module differ.
struct LoadReport {
  std::vector<std::string> missing;     ///< in the module only
  std::vector<std::string> unexpected;  ///< in the state_dict only
  std::vector<std::string> mismatched;  ///< in both, with another shape, or integers against floats
  bool matches() const { return missing.empty() && unexpected.empty() && mismatched.empty(); }
};

/// Base of everything that holds parameters. A Module can be moved but not copied: a copy would share its
/// parameters with the original. Const only protects the structure, as with Tensor.
///
/// Threads may call forward() of one module at the same time, but for layers that draw random numbers (Dropout in
/// training). While one changes it (load_state_dict, to, train, zero_grad, an optimizer's step), no other may use it.
class Module {
 public:
  Module() { detail::add_address(this, nullptr); }
  Module(Module&& other) : training_(other.training_), memory_format_(other.memory_format_) {
    detail::add_address(this, nullptr);
  }
  Module& operator=(Module&&) = default;
  virtual ~Module() { detail::remove_address(this); }

  /// The direct members, in order. Written by VG_MODULE.
  virtual Members members() { return {}; }

  /// All parameters below this module, each once even if modules share it, in order of declaration.
  Tensors parameters() const;
  Tensors buffers() const;
  /// The same with names: "up.weight", "blocks.0.norm.bias".
  NamedTensors named_parameters() const;
  NamedTensors named_buffers() const;
  std::vector<Module*> children() const;
  NamedModules named_children() const;
  /// This module, named "", and all below it, each before its children.
  NamedModules named_modules() const;

  /// Parameters and buffers by name, as detached handles: they see later changes; clone() them to keep values.
  TensorMap state_dict() const;
  /// How `state` differs from what this module needs.
  LoadReport compare_state_dict(const TensorMap& state) const;
  /// Throws as a strict load_state_dict does, and changes nothing.
  void check_state_dict(const TensorMap& state) const;
  /// Copies the values of `state` into the parameters and buffers, across devices and floating dtypes.
  /// Strict: throws one Error that lists every difference, before anything is copied. Otherwise the names
  /// that fit are loaded, and what did not is returned.
  LoadReport load_state_dict(const TensorMap& state, bool strict = true);

  /// Switches layers that behave differently in training (Dropout), here and in all children.
  void train(bool on = true);
  void eval() { train(false); }
  bool is_training() const { return training_; }
  /// Whether forward() depends on is_training(), as that of Dropout does.
  virtual bool depends_on_training() const { return false; }
  /// Returns the class name that is printed, without namespaces: "Conv3d" for Conv<3>, "WeightNorm" for other
  /// templates.
  virtual std::string class_name() const;
  /// Returns the options of a layer that are printed: "1, 8, kernel_size=[3, 3, 3]".
  virtual std::string extra_repr() const { return {}; }

  /// Moves or converts all parameters, buffers and gradients in place: handles elsewhere, an optimizer's for
  /// instance, follow. Only floating tensors change their dtype.
  void to(Device device);
  void to(DType dtype);
  /// Puts parameters, buffers and gradients of four and five axes into this format, in place, as PyTorch does: a
  /// weight (Cout, Cin / groups, kernel...) in channels_last has its second axis innermost. The convolutions below give
  /// their results in this format, whatever that of their input, and what follows them keeps it. Values, names and
  /// files are those of any format; the state of optimizers and averages follows with their next step.
  void to(MemoryFormat format);
  /// Drops all gradients.
  void zero_grad() const;
  void requires_grad_(bool value = true) const;
  /// Calls `function` on all children, then on this module.
  void apply(const std::function<void(Module&)>& function);

 protected:
  /// x in the format that to() asked for; x itself if it did not, or if x lacks its batch, that is, one of `axes`.
  Tensor in_memory_format(const Tensor& x, int64_t axes) const {
    return memory_format_ && x.defined() && x.dim() == axes ? x.contiguous(*memory_format_) : x;
  }

 private:
  Module& self() const { return const_cast<Module&>(*this); }
  NamedTensors named_tensors(bool buffers) const;
  void convert(const detail::Conversion& conversion) const;

  bool training_ = true;
  std::optional<MemoryFormat> memory_format_;
};

/// The module and all below it, a line each, with their options and the shapes of their parameters and buffers, and the
/// number of elements of the parameters, those shared counted once.
std::ostream& operator<<(std::ostream& out, const Module& module);

namespace detail {

/// "Conv3d(1, 8, kernel_size=[3, 3, 3])": the class's name and the options.
std::string summary(const Module& module);
/// For the profiler: from the outermost module that is being called on this thread, "UNet.blocks.0.conv".
std::string module_path(const Module& module);
inline profiler::Scope module_scope(const Module& module) {
  return {profiler::Kind::module, [&] { return module_path(module); }};
}

}  // namespace detail

/// The name of a layer as a template argument, for templates whose arguments do not name it.
struct LayerName {
  constexpr LayerName(const char* name) {
    for (int i = 0; name[i]; ++i) text[i] = name[i];
  }
  char text[24] = {};
};

/// A module that maps one tensor to one: layers, and what may stand in for one.
class Layer : public Module {
 public:
  virtual Tensor forward(const Tensor& x) const = 0;
  Tensor operator()(const Tensor& x) const {
    const auto scope = detail::module_scope(*this);
    return forward(x);
  }
};

namespace detail {

/// Throws unless `tensor` requires grad or did once.
void check_parameter(const std::string& name, const Tensor& tensor);

struct Bytes {
  const void* begin;
  size_t size;
  bool contains(const void* address) const {
    return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(begin) < size;
  }
};
/// Throws if a Module, Parameter or Buffer exists within `object`, the memory of `module`, but not within one of
/// `listed`, and has a tensor that `members` do not lead to, or depends on is_training().
void check_listed(const Module& module, const Bytes& object, std::initializer_list<Bytes> listed,
                  const Members& members);

template <class C>
C* declaring_class(Members (C::*)());

/// Checks a class T that inherits members() from C. Throws if T adds a Module, Parameter or Buffer, because the list of
/// C cannot contain it.
template <class T>
void check_inherited_list(T& value) {
  if constexpr (requires { declaring_class(&T::members); }) {
    using C = std::remove_pointer_t<decltype(declaring_class(&T::members))>;
    if (!std::is_same_v<C, T> && typeid(value) == typeid(T))
      check_listed(value, {std::addressof(value), sizeof(T)}, {{static_cast<C*>(std::addressof(value)), sizeof(C)}},
                   std::is_same_v<C, Module> ? Members() : value.members());
  }
}

template <class T>
void add_member(Members& members, const std::string& name, T& value) {
  if constexpr (std::is_base_of_v<Tensor, T>) {
    if (!value.defined()) return;
    if constexpr (!std::is_base_of_v<Buffer, T>) check_parameter(name, value);
    members.push_back({name, value, std::is_base_of_v<Buffer, T>, nullptr});
  } else if constexpr (std::is_base_of_v<Module, T>) {
    check_inherited_list(value);
    members.push_back({name, {}, false, &value});
  } else if constexpr (requires { std::begin(value); }) {
    int64_t index = 0;
    for (auto& element : value) add_member(members, name + '.' + std::to_string(index++), element);
  } else {  // a pointer or an optional
    static_assert(
        requires { static_cast<bool>(value), *value; },
        "VG_MODULE takes Tensors, Buffers, Modules, and containers of or pointers to them");
    if (value) add_member(members, name, *value);
  }
}

template <class M, class... Ts>
Members list_members(const M& module, [[maybe_unused]] const char* names, Ts&... values) {
  Members members;
  const std::vector<std::string> split = split_names(names);
  [[maybe_unused]] size_t i = 0;
  (add_member(members, split[i++], values), ...);
  check_listed(module, {std::addressof(module), sizeof(M)}, {Bytes{std::addressof(values), sizeof(Ts)}...}, members);
  return members;
}

template <class M, class... Args>
decltype(auto) forward(M& module, Args&&... args) {
  const auto scope = module_scope(module);
  return module.forward(std::forward<Args>(args)...);
}

}  // namespace detail
}  // namespace voxgrad::nn

/// Inside a class derived from nn::Module: names its members in order, and makes model(x, ...) model.forward(x, ...). A
/// Tensor is a parameter and has to require grad, an nn::Buffer is a buffer, a Module a child; vectors, arrays,
/// optionals and smart pointers of these too ("blocks.0", ...). Undefined tensors and null pointers are left out. A
/// class that derives from one with a VG_MODULE names the inherited members again. Not for classes inside of functions,
/// which C++ allows no templates.
///
/// parameters(), state_dict(), to() and all other functions that visit the members throw if a member is missing here
/// that would then be neither trained nor saved nor moved: a Module that has tensors or depends_on_training(), a
/// Parameter or a Buffer. They are found by their addresses, so the check does not notice plain Tensors, nor objects
/// behind pointers and in vectors: hold a module that is left out on purpose by a std::unique_ptr. It also skips
/// classes that define members() themselves, and the model itself if its class has no VG_MODULE.
#define VG_MODULE(...)                                                                          \
  ::voxgrad::nn::Members members() override {                                                   \
    return ::voxgrad::nn::detail::list_members(*this, #__VA_ARGS__ __VA_OPT__(, ) __VA_ARGS__); \
  }                                                                                             \
  template <class... Args>                                                                      \
  decltype(auto) operator()(Args&&... args) {                                                   \
    return ::voxgrad::nn::detail::forward(*this, std::forward<Args>(args)...);                  \
  }                                                                                             \
  template <class... Args>                                                                      \
  decltype(auto) operator()(Args&&... args) const {                                             \
    return ::voxgrad::nn::detail::forward(*this, std::forward<Args>(args)...);                  \
  }
