// Modules: objects with named parameters, buffers and children.
//
// A module lists its members through the virtual function members(), which VG_MODULE overrides. The constructor
// of a module does not register the module with its parent, so moving a module leaves no dangling pointer. The
// constructors of modules, parameters and buffers only record the address of the new object. VG_MODULE uses the
// recorded addresses to detect members that its list does not contain.
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

/// Records the address of a Module, Parameter or Buffer for check_listed(). Thread-safe.
void add_address(const Module* module, const Tensor* tensor);
/// Removes the record of an address. Thread-safe.
void remove_address(const void* address);

/// Converts a tensor to another device, dtype or memory format. Returns the same tensor if nothing changes.
using Conversion = std::function<Tensor(const Tensor&)>;
/// Converts a leaf and its gradient in place, so that all existing handles refer to the converted elements. A graph
/// that saved the old elements throws in its backward pass. `name` identifies the leaf in error messages.
void convert(const std::string& name, const Tensor& tensor, const Conversion& conversion);

/// Second base class of Parameter and Buffer, besides Tensor. Records the address of each object of class T.
template <class T>
struct Addressed {
  Addressed() { add_address(nullptr, static_cast<const T*>(this)); }
  Addressed(const Addressed&) : Addressed() {}
  Addressed& operator=(const Addressed&) { return *this; }
  ~Addressed() { remove_address(static_cast<const T*>(this)); }
};

}  // namespace detail

/// A tensor that is part of a module's state but is not trained, such as a running mean.
struct Buffer : Tensor, detail::Addressed<Buffer> {
  Buffer() = default;
  Buffer(Tensor tensor) : Tensor(std::move(tensor)) {}
};

/// A tensor that is trained. The constructor makes the given leaf require grad, and throws Error if the tensor is the
/// result of an operation. A plain Tensor that was created with {.requires_grad = true} is a parameter, too.
/// requires_grad_(false) freezes a parameter.
struct Parameter : Tensor, detail::Addressed<Parameter> {
  Parameter() = default;
  Parameter(const Tensor& tensor);
};

/// A named member of a module: a child if `module` is set, otherwise a parameter or a buffer.
struct Member {
  std::string name;
  Tensor tensor;
  bool is_buffer = false;
  Module* module = nullptr;
};
/// The members of a module, in the order in which VG_MODULE lists them.
using Members = std::vector<Member>;

/// Tensors with their names, in the order in which VG_MODULE lists them.
using NamedTensors = std::vector<std::pair<std::string, Tensor>>;
/// Modules with their names. The pointers are valid until a module is moved or destroyed.
using NamedModules = std::vector<std::pair<std::string, Module*>>;

/// The differences between a state_dict and a module, as lists of names.
struct LoadReport {
  std::vector<std::string> missing;     ///< names that only the module has
  std::vector<std::string> unexpected;  ///< names that only the state_dict has
  std::vector<std::string> mismatched;  ///< names with different shapes or incompatible dtypes
  /// Returns true if there are no differences.
  bool matches() const { return missing.empty() && unexpected.empty() && mismatched.empty(); }
};

/// Base class of everything that has parameters. A Module can be moved but not copied, because a copy would share its
/// parameters with the original. As with Tensor, a const Module protects its structure but not the values of its
/// tensors.
///
/// Several threads may call forward() of one module at the same time, unless a layer draws random numbers or changes
/// its state in training (Dropout, BatchNorm, SpectralNorm). While a thread changes the module (load_state_dict, to,
/// train, zero_grad, a step of an optimizer), no other thread may use the module.
class Module {
 public:
  Module() { detail::add_address(this, nullptr); }
  Module(Module&& other) : training_(other.training_), memory_format_(other.memory_format_) {
    detail::add_address(this, nullptr);
  }
  Module& operator=(Module&&) = default;
  virtual ~Module() { detail::remove_address(this); }

  /// Returns the direct members, in the order in which VG_MODULE lists them. VG_MODULE overrides this function.
  virtual Members members() { return {}; }

  /// Returns the parameters of this module and of all modules below it, in the order in which VG_MODULE lists
  /// them. A parameter that several modules share appears once.
  Tensors parameters() const;
  /// Returns the buffers of this module and of all modules below it. A shared buffer appears once.
  Tensors buffers() const;
  /// Returns the parameters with their names, such as "up.weight" or "blocks.0.norm.bias". A shared parameter appears
  /// under each of its names.
  NamedTensors named_parameters() const { return named_tensors(false); }
  /// Returns the buffers with their names.
  NamedTensors named_buffers() const { return named_tensors(true); }
  /// Returns the direct children.
  std::vector<Module*> children() const;
  /// Returns the direct children with their names.
  NamedModules named_children() const;
  /// Returns this module, named "", and all modules below it. Each module precedes its children.
  NamedModules named_modules() const;

  /// Returns the parameters and buffers by name, as detached tensors that share memory with the module. Their values
  /// change with the module; clone() them to keep the current values. Throws Error if two members have the same name.
  TensorMap state_dict() const;
  /// Compares the names, shapes and dtypes of `state` with those of state_dict().
  LoadReport compare_state_dict(const TensorMap& state) const;
  /// Throws the Error that a strict load_state_dict(state) would throw. Changes nothing.
  void check_state_dict(const TensorMap& state) const;
  /// Copies the values of `state` into the parameters and buffers. The devices and the floating-point dtypes may
  /// differ. If there are differences and `strict` is true, throws one Error that lists them all and copies nothing.
  /// Otherwise copies the entries that fit and returns the differences.
  LoadReport load_state_dict(const TensorMap& state, bool strict = true);

  /// Sets training mode (the default) or evaluation mode, in this module and in all modules below it. The mode affects
  /// layers such as Dropout and BatchNorm.
  void train(bool on = true) {
    for (const auto& [name, module] : named_modules()) module->training_ = on;
  }
  /// Sets evaluation mode: train(false).
  void eval() { train(false); }
  bool is_training() const { return training_; }
  /// Returns whether forward() depends on is_training(). Dropout, for example, returns true.
  virtual bool depends_on_training() const { return false; }
  /// Returns the class name for printing, without namespaces and template arguments. A single digit as the template
  /// argument is the number of axes and becomes a suffix: "Conv3d" for Conv<3>.
  virtual std::string class_name() const;
  /// Returns the options that are printed after the class name: "1, 8, kernel_size=[3, 3, 3]".
  virtual std::string extra_repr() const { return {}; }

  /// Moves all parameters, buffers and gradients to a device, in place: other handles of these tensors, such as those
  /// of an optimizer, refer to the moved tensors. Throws Error if the device is not available.
  void to(Device device);
  /// Converts all floating-point parameters, buffers and gradients to a floating-point dtype, in place. Integer tensors
  /// keep their dtype. Throws Error if `dtype` is not a floating-point dtype.
  void to(DType dtype);
  /// Converts all parameters, buffers and gradients with four or five axes to a memory format, in place, as PyTorch
  /// does. In channels_last the second axis of a weight (out_channels, in_channels / groups, kernel...) is innermost.
  /// Convolution layers then return results in this format for inputs of any format, and subsequent layers keep the
  /// format of their inputs. Names, values and saved files do not depend on the format. The state of optimizers and
  /// averages is converted in their next step.
  void to(MemoryFormat format);
  /// Drops the gradients of all parameters.
  void zero_grad() const {
    for (const auto& [name, tensor] : named_parameters()) tensor.set_grad({});
  }
  /// Sets requires_grad of all parameters. false freezes the parameters.
  void requires_grad_(bool value = true) const {
    for (const auto& [name, tensor] : named_parameters()) tensor.requires_grad_(value);
  }
  /// Calls `function` on this module and on all modules below it. Children precede their parents.
  void apply(const std::function<void(Module&)>& function) {
    for (const auto& [name, child] : named_children()) child->apply(function);
    function(*this);
  }

 protected:
  /// Returns x in the format of the last call of to(MemoryFormat). Returns x itself if to(MemoryFormat) was not called,
  /// or if the number of axes of x is not `axes`, for example because x has no batch axis.
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

/// Prints the module and all modules below it, one per line, with their options and the shapes of their parameters and
/// buffers. The last line is the total number of elements of the parameters, and the number of trained elements if some
/// parameters are frozen. Shared parameters count once.
std::ostream& operator<<(std::ostream& out, const Module& module);

namespace detail {

/// Returns the class name and the options: "Conv3d(1, 8, kernel_size=[3, 3, 3])".
std::string summary(const Module& module);
/// Returns the path of a module from the outermost module that this thread is calling: "UNet.blocks.0.conv".
std::string module_path(const Module& module);
/// Returns a profiler scope for one call of the module.
inline profiler::Scope module_scope(const Module& module) {
  return {profiler::Kind::module, [&] { return module_path(module); }};
}

/// Throws unless `tensor` requires grad, or required grad before it was frozen.
void check_parameter(const std::string& name, const Tensor& tensor);

/// A range of memory.
struct Bytes {
  const void* begin;
  size_t size;  ///< in bytes
  bool contains(const void* address) const {
    return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(begin) < size;
  }
};
/// Throws if the memory `object` of `module` contains an unlisted member. An unlisted member is a Module, Parameter or
/// Buffer that lies outside the ranges `listed` and has state that `members` does not contain. The state of a member
/// consists of its tensors and of its layers that depend on is_training().
void check_listed(const Module& module, const Bytes& object, std::initializer_list<Bytes> listed,
                  const Members& members);

/// Deduces the class that declares members(). The function has no definition, because only its type is used.
template <class C>
C* declaring_class(Members (C::*)());

/// Checks a class T that inherits members() from C. Throws if T adds a Module, Parameter or Buffer, because the list of
/// C cannot contain the added member.
template <class T>
void check_inherited_list(T& value) {
  if constexpr (requires { declaring_class(&T::members); }) {
    using C = std::remove_pointer_t<decltype(declaring_class(&T::members))>;
    if (!std::is_same_v<C, T> && typeid(value) == typeid(T))
      check_listed(value, {std::addressof(value), sizeof(T)}, {{static_cast<C*>(std::addressof(value)), sizeof(C)}},
                   std::is_same_v<C, Module> ? Members() : value.members());
  }
}

/// Appends `value` to `members`: a Tensor, a Module, a container of these, or a pointer to one of them.
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
        "VG_MODULE takes Tensors, Buffers and Modules, containers of these, and pointers to these");
    if (value) add_member(members, name, *value);
  }
}

/// Implements members() for VG_MODULE. `names` is the macro's argument list as text.
template <class M, class... Ts>
Members list_members(const M& module, [[maybe_unused]] const char* names, Ts&... values) {
  Members members;
  const std::vector<std::string> split = split_names(names);
  [[maybe_unused]] size_t i = 0;
  (add_member(members, split[i++], values), ...);
  check_listed(module, {std::addressof(module), sizeof(M)}, {Bytes{std::addressof(values), sizeof(Ts)}...}, members);
  return members;
}

/// Calls module.forward(args...) in a profiler scope.
template <class M, class... Args>
decltype(auto) forward(M& module, Args&&... args) {
  const auto scope = module_scope(module);
  return module.forward(std::forward<Args>(args)...);
}

}  // namespace detail

/// A string literal as a template argument. Layer templates such as Activation use the text as their class name.
struct LayerName {
  constexpr LayerName(const char* name) {
    for (int i = 0; name[i]; ++i) text[i] = name[i];
  }
  char text[24] = {};
};

/// Base class of modules that map one tensor to one tensor.
class Layer : public Module {
 public:
  virtual Tensor forward(const Tensor& x) const = 0;
  /// Calls forward(). A running profiler records the call.
  Tensor operator()(const Tensor& x) const {
    const auto scope = detail::module_scope(*this);
    return forward(x);
  }
};

}  // namespace voxgrad::nn

/// Lists the members of a class derived from nn::Module, in order, and makes model(x, ...) call model.forward(x, ...).
/// A Tensor is a parameter and must require grad. An nn::Buffer is a buffer, and a Module is a child. Vectors, arrays,
/// optionals and smart pointers of these are allowed; their elements are named "blocks.0", "blocks.1" and so on.
/// Undefined tensors and null pointers are skipped. A class that derives from a class with VG_MODULE must list the
/// inherited members again. The macro cannot be used in local classes, because C++ does not allow member templates
/// there.
///
/// parameters(), state_dict(), to() and all other functions that visit the members throw Error if the list lacks a
/// Parameter, a Buffer, or a Module that has tensors or whose depends_on_training() returns true. Otherwise, such a
/// member would be neither trained nor saved nor moved. The check compares the addresses of the class's members. The
/// check cannot detect plain Tensors, objects in vectors, or objects behind pointers. To omit a module on purpose,
/// store it in a std::unique_ptr. The check also skips classes that define members() without the macro, and the
/// outermost module if its class has no VG_MODULE.
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
