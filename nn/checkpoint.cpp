#include "nn/checkpoint.h"

#include <cstdio>

#include "nn/fields.h"

namespace voxgrad {
namespace {

/// The generator's numbers, as they are in the file.
nn::Fields fields_of(GeneratorState& state) { return {{"seed", &state.seed}, {"offset", &state.offset}}; }

/// The entries of one part. Throws if there are none.
TensorMap part(const std::filesystem::path& path, const TensorMap& file, const char* name) {
  TensorMap entries = nn::with_prefix(file, concat(name, '.'));
  check(!entries.empty(), "load_checkpoint", path.string(), " has no ", name);
  return entries;
}

/// Reads parts twice: first all are checked, then all are loaded.
void restore(const std::filesystem::path& path, const TensorMap& file, const CheckpointParts& parts, bool keep) {
  const auto visit = [&](auto* object, const char* name) {
    if (!object) return;
    const TensorMap entries = part(path, file, name);
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
    nn::read_fields(part(path, file, "generator"), "", fields_of(state), "load_checkpoint");
    if (keep) parts.generator->set_state(state);
  }
}

}  // namespace

void save_checkpoint(const std::filesystem::path& path, const CheckpointParts& parts, const Metadata& metadata) {
  TensorMap file;
  if (parts.model) {
    const TensorMap state = parts.model->state_dict();
    check(!state.empty(), "save_checkpoint", "the model has no parameters: does its class name them in VG_MODULE?");
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
  save_safetensors(path, file, metadata, {.checksum = true});
}

Metadata load_checkpoint(const std::filesystem::path& path, const CheckpointParts& parts) {
  SafetensorsFile saved(path, {}, "load_checkpoint");
  const TensorMap file = saved.load_all();
  restore(path, file, parts, false);
  if (!saved.has_checksum())
    std::fprintf(stderr, "load_checkpoint: warning: '%s' has no checksum, damaged numbers in it would go unnoticed\n",
                 path.c_str());
  restore(path, file, parts, true);
  return saved.metadata();
}

}  // namespace voxgrad
