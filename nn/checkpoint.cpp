// Implements the checkpoints of training runs.
#include "nn/checkpoint.h"

#include <cmath>
#include <cstdio>
#include <utility>
#include <vector>

#include "core/autograd.h"
#include "nn/fields.h"
#include "ops/reduce.h"

namespace voxgrad {
namespace {

constexpr const char* kLoad = "load_checkpoint";
constexpr const char* kSave = "save_checkpoint";

/// Returns the fields of a generator's state, with their names in the file.
nn::Fields fields_of(GeneratorState& state) { return {{"seed", &state.seed}, {"offset", &state.offset}}; }

/// Returns the parts other than the model, the generator and the step, with their names in the file.
std::vector<std::pair<const char*, nn::Stateful*>> stateful_parts(const CheckpointParts& parts) {
  return {{"optimizer", parts.optimizer},
          {"schedule", parts.schedule},
          {"loader", parts.loader},
          {"scaler", parts.scaler},
          {"average", parts.average}};
}

/// Throws if `file` contains a parameter of the model that is not finite, or a buffer that contains NaN.
void check_values(const char* op, const nn::Module& model, const TensorMap& file) {
  const NoGradGuard no_grad;
  const auto check_tensors = [&](const nn::NamedTensors& tensors, bool finite) {
    for (const auto& [own_name, tensor] : tensors) {
      const std::string name = "model." + own_name;
      const Tensor& values = file.at(name);
      if (!is_floating(values.dtype()) || values.numel() == 0) continue;
      const double low = amin(values).item(), high = amax(values).item();  // both are NaN if any element is NaN
      check(finite ? std::isfinite(low) && std::isfinite(high) : !std::isnan(low), op, name, " must ",
            finite ? "be finite, but contains " : "not contain ", std::isnan(low) ? "NaN" : "infinities");
    }
  };
  check_tensors(model.named_parameters(), true);
  check_tensors(model.named_buffers(), false);
}

/// Checks the contents of a file against all parts, and restores the parts if `keep`.
void visit_parts(const std::filesystem::path& path, const TensorMap& file, const CheckpointParts& parts, bool keep) {
  const auto entries = [&](const char* name) {
    TensorMap found = nn::with_prefix(file, concat(name, '.'));
    check(!found.empty(), kLoad, path.string(), " has no ", name);
    return found;
  };
  const auto visit = [&](const char* name, auto* part) {
    if (!part) return;
    if (keep)
      part->load_state_dict(entries(name));
    else
      part->check_state_dict(entries(name));
  };
  visit("model", parts.model);
  for (const auto& [name, part] : stateful_parts(parts)) visit(name, part);
  if (parts.generator) {
    GeneratorState state;
    nn::read_fields(entries("generator"), "", fields_of(state), kLoad);
    if (keep) parts.generator->set_state(state);
  }
  if (parts.step) nn::read_fields(file, "", {{"step", parts.step}}, kLoad, keep);
}

}  // namespace

void save_checkpoint(const std::filesystem::path& path, const CheckpointParts& parts, const Metadata& metadata) {
  TensorMap file;
  if (parts.model) {
    const TensorMap state = parts.model->state_dict();
    check(!state.empty(), kSave,
          "the model has no parameters; a module must list its parameters and submodules in VG_MODULE");
    nn::add_prefixed(file, "model.", state);
    check_values(kSave, *parts.model, file);
  }
  for (const auto& [name, part] : stateful_parts(parts))
    if (part) nn::add_prefixed(file, concat(name, '.'), part->state_dict());
  if (parts.generator) {
    GeneratorState state = parts.generator->state();
    nn::write_fields(file, "generator.", fields_of(state));
  }
  if (parts.step) nn::write_fields(file, "", {{"step", parts.step}});
  save_safetensors(path, file, metadata, {.checksum = true});
}

Metadata load_checkpoint(const std::filesystem::path& path, const CheckpointParts& parts) {
  const auto [file, metadata, has_checksum] = read_safetensors(path, Device::cpu(), {}, kLoad);
  visit_parts(path, file, parts, false);
  if (parts.model) check_values(kLoad, *parts.model, file);
  if (!has_checksum)
    std::fprintf(stderr, "load_checkpoint: warning: '%s' has no checksum; damaged data cannot be detected\n",
                 path.c_str());
  visit_parts(path, file, parts, true);
  return metadata;
}

}  // namespace voxgrad
