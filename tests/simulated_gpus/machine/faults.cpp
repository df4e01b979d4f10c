// Faults of GPUs: SIM_FAULT=KIND:work=NAME,gpu=K,unless=VARIABLE.

#include "machine.h"

#include <cstdio>
#include <cstdlib>

#include <unistd.h>

namespace sim {
namespace {

enum class Kind { None, Hang, Crash, Wrong };

struct Fault {
  Kind kind = Kind::None;
  std::string work;  // empty: all
  int gpu = -1;      // on its host; -1: all

  Fault() {
    const auto text = text_setting("SIM_FAULT");
    if (text.empty()) return;
    const auto colon = text.find(':');
    const auto name = text.substr(0, colon);
    kind = name == "hang" ? Kind::Hang : name == "crash" ? Kind::Crash : name == "wrong" ? Kind::Wrong : Kind::None;
    bool is_valid = kind != Kind::None;
    for (size_t from = colon; from != std::string::npos; from = text.find(',', from + 1)) {
      const auto option = text.substr(from + 1, text.find(',', from + 1) - from - 1);
      const auto equals = option.find('=');
      const auto key = option.substr(0, equals), value = equals == std::string::npos ? "" : option.substr(equals + 1);
      if (key == "work") {
        work = value;
      } else if (key == "gpu") {
        gpu = atoi(value.c_str());
      } else if (key != "unless") {
        is_valid = false;
      } else if (setting(value.c_str(), 0) == 1) {
        kind = Kind::None;
      }
    }
    if (is_valid) return;
    fprintf(stderr, "sim: SIM_FAULT=%s: expected {hang,crash,wrong}:work=NAME,gpu=K,unless=VARIABLE\n", text.c_str());
    abort();
  }
};

bool has_fault(Kind kind, const char* work, int device) {
  static const auto* fault = new Fault;
  return fault->kind == kind && (fault->work.empty() || fault->work == work) &&
         (fault->gpu == -1 || fault->gpu == physical_device(device));
}

}  // namespace

std::function<void()> with_fault(const char* name, int device, std::function<void()> work) {
  if (has_fault(Kind::Crash, name, device)) return [] { abort(); };
  if (!has_fault(Kind::Hang, name, device)) return work;
  return [name] {
    trace("%s hangs", name);
    for (;;) pause();
  };
}

void spoil(const char* work, int device, void* result, size_t bytes) {
  if (bytes > 0 && has_fault(Kind::Wrong, work, device)) *static_cast<unsigned char*>(result) ^= 1;
}

}  // namespace sim
