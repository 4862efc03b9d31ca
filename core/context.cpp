#include "core/detail/context.h"

namespace voxgrad {
namespace {

std::vector<Context::Setting>& settings() {
  static std::vector<Context::Setting> list;
  return list;
}

}  // namespace

bool Context::add(const Setting& setting) {
  settings().push_back(setting);
  return true;
}

std::vector<Context::Guard> Context::reset() {
  std::vector<Guard> guards;
  for (const Setting& setting : settings())
    if (setting.reset) guards.push_back(setting.reset());
  return guards;
}

Context::Context() {
  for (const Setting& setting : settings()) captured_.push_back(setting.capture());
}

std::vector<Context::Guard> Context::enter() const {
  std::vector<Guard> guards;
  for (const auto& set : captured_) guards.push_back(set());
  return guards;
}

}  // namespace voxgrad
