// Faults from outside: SIM_NCCL_FAULT=KIND:rank=R,call=N.

#include <cstdio>
#include <cstdlib>

#include "communicator.h"

namespace sim_nccl {
namespace {

struct Fault {
  FaultKind kind = FaultKind::None;
  int rank = 0;
  long call = 1;
  Stop is_over{false};

  Fault() {
    const auto text = sim::text_setting("SIM_NCCL_FAULT");
    if (text.empty()) return;
    const auto colon = text.find(':');
    const auto name = text.substr(0, colon);
    kind = name == "remote"   ? FaultKind::Remote
           : name == "system" ? FaultKind::System
           : name == "launch" ? FaultKind::Launch
           : name == "init"   ? FaultKind::Init
                              : FaultKind::None;
    for (size_t from = colon; from != std::string::npos && from < text.size(); from = text.find(',', from + 1)) {
      const auto option = text.substr(from + 1);
      if (sscanf(option.c_str(), "rank=%d", &rank) != 1 && sscanf(option.c_str(), "call=%ld", &call) != 1) {
        kind = FaultKind::None;
      }
    }
    if (kind != FaultKind::None) return;
    fprintf(stderr, "sim: SIM_NCCL_FAULT=%s: expected {remote,system,launch,init}:rank=R,call=N\n", text.c_str());
    abort();
  }
};

}  // namespace

FaultKind fault_at(bool is_init, int rank, long number) {
  static auto* fault = new Fault;
  if (fault->kind == FaultKind::None || is_init != (fault->kind == FaultKind::Init)) return FaultKind::None;
  if (rank != fault->rank || number != fault->call || fault->is_over.exchange(true)) return FaultKind::None;
  sim::trace("NCCL fault at rank %d", rank);
  return fault->kind;
}

}  // namespace sim_nccl
