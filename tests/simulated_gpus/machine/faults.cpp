// Faults: SIM_FAULT=KIND:work=NAME,gpu=K,unless=VARIABLE, and how such a setting is read.

#include "machine.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include <unistd.h>

namespace sim {

std::string Fault::option(const char* key) const {
  auto found = options.find(key);
  return found == options.end() ? std::string() : found->second;
}

Fault read_fault(const char* variable, const std::set<std::string>& kinds, const std::set<std::string>& keys) {
  const auto text = text_setting(variable);
  auto end_of_part = [&](char mark, size_t from) { return std::min(text.find(mark, from), text.size()); };
  size_t at = end_of_part(':', 0);
  Fault fault{text.substr(0, at), {}};
  bool is_valid = text.empty() || kinds.count(fault.kind) != 0;
  while (at < text.size()) {
    const size_t from = at + 1, equals = end_of_part('=', from);
    at = end_of_part(',', from);
    const auto key = text.substr(from, equals - from);
    is_valid &= equals < at && keys.count(key) != 0;
    if (is_valid) fault.options[key] = text.substr(equals + 1, at - equals - 1);
  }
  if (is_valid) return fault;
  fprintf(stderr, "sim: %s=%s is no fault\n", variable, text.c_str());
  abort();
}

static bool has_fault(const char* kind, const char* work, int device) {
  static const auto* fault = new Fault(read_fault("SIM_FAULT", {"hang", "crash", "wrong"}, {"work", "gpu", "unless"}));
  if (fault->kind != kind) return false;
  const auto name = fault->option("work"), gpu = fault->option("gpu"), unless = fault->option("unless");
  return (name.empty() || name == work) && (gpu.empty() || atoi(gpu.c_str()) == physical_device(device)) &&
         (unless.empty() || setting(unless.c_str(), 0) != 1);
}

std::function<void()> with_fault(const char* name, int device, std::function<void()> work) {
  if (has_fault("crash", name, device)) return [] { abort(); };
  if (!has_fault("hang", name, device)) return work;
  return [name] {
    trace("%s hangs", name);
    for (;;) pause();
  };
}

void spoil(const char* work, int device, void* result, size_t bytes) {
  if (bytes > 0 && has_fault("wrong", work, device)) *static_cast<unsigned char*>(result) ^= 1;
}

}  // namespace sim
