// A communicator, as one rank sees it.
#pragma once

#include <atomic>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap.h"

namespace sim_nccl {

// One call, with the rank's own buffers.
struct Call {
  Agreement agreed;
  const void* input;
  void* output;
  size_t bytes() const { return agreed.count * element_sizes[agreed.type]; }
  bool is_collective() const { return agreed.operation != Send && agreed.operation != Recv; }
};

}  // namespace sim_nccl

struct ncclComm {
  static constexpr uint64_t alive = 0x5349'4d43'4f4d'4d00;
  uint64_t state = alive;
  sim_nccl::UniqueId id;
  int rank, size, device;

  std::shared_ptr<sim_nccl::Inbox> inbox;
  sim_nccl::Group group;
  std::thread bootstrap;
  std::thread launcher;             // of the last group
  std::atomic<bool> is_launching{false};
  std::atomic<bool> is_joined{false};
  sim_nccl::Stop is_aborted{false};
  bool is_finalized = false;
  std::atomic<int> error{sim_nccl::Success};
  std::string error_text;           // complete before `error` is set
  std::atomic<int> polls_left{0};   // how often it still answers "in progress"
  std::atomic<int> outstanding{0};  // launches that have not ended
  long launches = 0;                // made by the host so far
  // Of the stream's thread.
  uint64_t collectives = 0;
  std::map<std::pair<sim_nccl::Channel, int>, uint64_t> messages;  // by peer
};

namespace sim_nccl {

using Comm = ncclComm*;

// Makes the communicator fail, for ncclCommGetAsyncError. The first error stays.
void fail(Comm comm, Result result, const std::string& reason);
// Returns the state of the communicator, which includes "in progress". Counts as one poll.
Result poll(Comm comm);
// Whether nothing is left to do after ncclCommFinalize.
bool is_final(Comm comm);
// Has the next two polls answer "in progress".
void begin_polls(Comm comm);

// Returns the kind of the fault that hits the launch `number` of `rank`, once per process, or an empty one:
// SIM_NCCL_FAULT=KIND:rank=R,call=N. For `init` the launch is a communicator that is made.
std::string fault_at(bool is_init, int rank, long number);

// Carries out the calls of one launch, on the thread of the stream. Returns when all have ended, or at the abort.
void run(Comm comm, const std::vector<Call>& calls, uint64_t number, const std::string& fault);

}  // namespace sim_nccl
