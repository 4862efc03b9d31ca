#include "nn/checkpoint.h"

#include <cstdio>

#include "nn/fields.h"

namespace voxgrad {
namespace {

/// The generator's numbers with their names in the file.
nn::Fields fields_of(GeneratorState& state) { return {{"seed", &state.seed}, {"offset", &state.offset}}; }

/// Checks the contents of a file against all parts, and restores the parts if `keep`. Saving performs the same check as
/// loading, so that every saved file can be loaded.
void visit_parts(const char* op, const std::filesystem::path& path, const TensorMap& file, const CheckpointParts& parts,
                 bool keep) {
  const auto part = [&](const char* name) {
    TensorMap entries = nn::with_prefix(file, concat(name, '.'));
    check(!entries.empty(), op, path.string(), " has no ", name);
    return entries;
  };
  const auto visit = [&](auto* object, const char* name) {
    if (!object) return;
    const TensorMap entries = part(name);
    if (keep)
      object->load_state_dict(entries);
    else
      object->check_state_dict(entries);
  };
  visit(parts.model, "model");
  visit(parts.optimizer, "optimizer");
  visit(parts.schedule, "schedule");
  visit(parts.loader, "loader");
  visit(parts.scaler, "scaler");
  visit(parts.average, "average");
  if (parts.generator) {
    GeneratorState state;
    nn::read_fields(part("generator"), "", fields_of(state), op);
    if (keep) parts.generator->set_state(state);
  }
  if (parts.step) {
    int64_t step = 0;
    nn::read_fields(file, "", {{"step", &step}}, op);
    optim::check_count(op, "step", step, 0);
    if (keep) *parts.step = step;
  }
  if (keep || !parts.model) return;
  const auto check_tensors = [&](const nn::NamedTensors& tensors, bool finite) {
    for (const auto& [name, tensor] : tensors) nn::check_values(op, "model." + name, file.at("model." + name), finite);
  };
  check_tensors(parts.model->named_parameters(), true);
  check_tensors(parts.model->named_buffers(), false);
}

}  // namespace

void save_checkpoint(const std::filesystem::path& path, const CheckpointParts& parts, const Metadata& metadata) {
  TensorMap file;
  if (parts.model) {
    const TensorMap state = parts.model->state_dict();
    check(!state.empty(), "save_checkpoint", "the model has no parameters: does its class list them in VG_MODULE?");
    nn::add_prefixed(file, "model.", state);
  }
  if (parts.optimizer) nn::add_prefixed(file, "optimizer.", parts.optimizer->state_dict());
  if (parts.schedule) nn::add_prefixed(file, "schedule.", parts.schedule->state_dict());
  if (parts.loader) nn::add_prefixed(file, "loader.", parts.loader->state_dict());
  if (parts.scaler) nn::add_prefixed(file, "scaler.", parts.scaler->state_dict());
  if (parts.average) nn::add_prefixed(file, "average.", parts.average->state_dict());
  if (parts.generator) {
    GeneratorState state = parts.generator->state();
    nn::write_fields(file, "generator.", fields_of(state));
  }
  if (parts.step) nn::write_fields(file, "", {{"step", parts.step}});
  visit_parts("save_checkpoint", path, file, parts, false);
  save_safetensors(path, file, metadata, {.checksum = true});
}

Metadata load_checkpoint(const std::filesystem::path& path, const CheckpointParts& parts) {
  const auto [file, metadata, has_checksum] = read_safetensors(path, Device::cpu(), {}, "load_checkpoint");
  visit_parts("load_checkpoint", path, file, parts, false);
  if (!has_checksum)
    std::fprintf(stderr, "load_checkpoint: warning: '%s' has no checksum, so damaged data would not be detected\n",
                 path.c_str());
  visit_parts("load_checkpoint", path, file, parts, true);
  return metadata;
}

}  // namespace voxgrad
