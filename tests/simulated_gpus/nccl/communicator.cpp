// The state of a communicator, and how it ends.

#include "communicator.h"

namespace sim_nccl {

static std::mutex error_mutex;

void fail(Comm comm, Result result, const std::string& reason) {
  std::lock_guard<std::mutex> lock(error_mutex);
  if (comm->error != Success) return;
  sim::trace("NCCL: rank %d fails: %s", comm->rank, reason.c_str());
  remember(reason);
  comm->error_text = reason;
  comm->error = result;
}

bool is_final(Comm comm) {
  if (comm->outstanding > 0 || !comm->inbox->all_final(comm->rank)) return false;
  for (auto& peer : comm->group.peers) {
    if (peer != nullptr && !peer->is_flushed()) return false;
  }
  return true;
}

void begin_polls(Comm comm) { comm->polls_left = 2; }

Result poll(Comm comm) {
  if (comm->error != Success) return static_cast<Result>(comm->error.load());
  if (!comm->is_joined || comm->is_launching || (comm->is_finalized && !is_final(comm))) return InProgress;
  if (comm->polls_left > 0) {
    comm->polls_left--;
    return InProgress;
  }
  return Success;
}

std::string fault_at(bool is_init, int rank, long number) {
  static const auto* fault =
      new sim::Fault(sim::read_fault("SIM_NCCL_FAULT", {"remote", "system", "launch", "init"}, {"rank", "call"}));
  static std::atomic<bool> is_over{false};
  if (fault->kind.empty() || is_init != (fault->kind == "init")) return {};
  if (rank != std::stoi(fault->option("rank")) || number != std::stol(fault->option("call"))) return {};
  if (is_over.exchange(true)) return {};
  sim::trace("NCCL fault at rank %d", rank);
  return fault->kind;
}

}  // namespace sim_nccl
