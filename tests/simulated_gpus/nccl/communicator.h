// A communicator, as one rank sees it.
#pragma once

#include <atomic>

#include "hub.h"

struct ncclComm;

namespace sim_nccl {

// One call, with the rank's own buffers.
struct Call {
  Agreement agreed;
  const void* input;
  void* output;
};

// The calls of a group, which are launched together.
struct Launch {
  ncclComm* comm;
  sim::Stream* stream;
  std::vector<Call> calls;
  long number = 0;    // among those of the communicator, from 1
  std::string fault;  // that hits it
};

}  // namespace sim_nccl

struct ncclComm {
  static constexpr uint64_t alive = 0x5349'4d43'4f4d'4d00;
  uint64_t state = alive;
  int rank, size, device;

  int hub = -1;  // the connection, -1 while it never joins
  bool is_joined = false;
  bool is_finalized = false;
  bool has_told_hub = false;  // that it is finalized
  bool is_final = false;
  sim_nccl::Launch pending;  // it has calls until it is launched
  int polls_left = 0;        // how often it still answers "in progress"
  long launches = 0;         // made by the host so far
  std::atomic<long> launched{0}, ended{0};  // launches that streams have got, and those of them that have ended
  std::atomic<bool> is_aborted{false};
  std::atomic<int> error{sim_nccl::Success};
  std::string error_text;  // complete before `error` is set
};

namespace sim_nccl {

using Comm = ncclComm*;

// Keeps the text for ncclGetLastError, which is the process's. Returns `result`.
Result failed(Result result, const std::string& reason);
// Makes the communicator fail, for ncclCommGetAsyncError. The first error stays.
void fail(Comm comm, Result result, const std::string& reason);

// Joins the hub of `id`. Polls find out whether all ranks have.
void join(Comm comm, const UniqueId& id);
// Has the communicator answer "in progress" for some polls. The last of them launches.
Result begin(const Launch& launch);
// Returns the state of the communicator, which includes "in progress". Counts as one poll.
Result poll(Comm comm);
// Ends the communicator. Its memory stays, so that a later use is noticed.
void end(Comm comm);

// Returns the kind of the fault that hits the launch `number` of `rank`, once per process, or an empty one:
// SIM_NCCL_FAULT=KIND:rank=R,call=N. Launch 0 is to join.
std::string fault_at(int rank, long number);

}  // namespace sim_nccl
