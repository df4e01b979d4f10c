// Faults: SIM_FAULT=KIND:work=NAME,gpu=K,unless=VARIABLE.

#include "machine.h"

#include <algorithm>
#include <cstdlib>

#include <unistd.h>

namespace sim {

// Returns the value of `key` in the setting, or nothing.
static std::string option(const std::string& text, const std::string& key) {
  const auto place = text.find(key + "=");
  if (place == std::string::npos) return {};
  const auto from = place + key.size() + 1;
  return text.substr(from, std::min(text.find(',', from), text.size()) - from);
}

static bool has_fault(const std::string& kind, const char* name, int device) {
  static const auto text = text_setting("SIM_FAULT");
  if (text.rfind(kind, 0) != 0) return false;
  static const auto work = option(text, "work"), gpu = option(text, "gpu"), unless = option(text, "unless");
  return (work.empty() || work == name) && (gpu.empty() || atoi(gpu.c_str()) == physical_device(device)) &&
         (unless.empty() || setting(unless.c_str(), 0) != 1);
}

std::function<void()> with_fault(const char* name, int device, std::function<void()> work) {
  if (has_fault("crash", name, device)) return [] { abort(); };
  if (!has_fault("hang", name, device)) return work;
  return [] {
    for (;;) pause();
  };
}

void spoil(const char* work, int device, void* result, size_t bytes) {
  if (bytes > 0 && has_fault("wrong", work, device)) *static_cast<unsigned char*>(result) ^= 1;
}

}  // namespace sim
