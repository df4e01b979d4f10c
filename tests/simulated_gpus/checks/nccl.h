// NCCL as a program sees it, and ranks that use it.
#pragma once

#include "../nccl/types.h"
#include "checks.h"

extern "C" {
struct ncclComm;
int ncclGetUniqueId(sim_nccl::UniqueId* id);
int ncclCommInitRankConfig(ncclComm** comm, int size, sim_nccl::UniqueId id, int rank, const void* config);
int ncclCommGetAsyncError(ncclComm* comm, int* state);
int ncclCommFinalize(ncclComm* comm);
int ncclCommDestroy(ncclComm* comm);
int ncclCommAbort(ncclComm* comm);
int ncclAllReduce(const void* input, void* output, size_t count, int type, int reduction, ncclComm* comm,
                  sim::Stream* stream);
}

namespace checks {

using sim_nccl::UniqueId;

// ncclConfig_t of version 2.28, with blocking = 0.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef, version = 22809;
  int blocking = 0;
  char rest[72] = {};
};

// A rank on a GPU of its own. Its buffer has `count` numbers.
struct Rank {
  int rank, size;
  ncclComm* comm = nullptr;
  sim::Stream* stream = nullptr;
  float* buffer = nullptr;
  size_t count = 4;

  // Joins, without waiting for the others.
  Rank(int rank, int size, const UniqueId& id, int device = -1);
  // The communicator's state; "in progress" has been waited for.
  int state() const;
  // The state without waiting.
  int poll() const;
  // Fills the buffer on the stream.
  void fill(float value) const;
  // A sum over all ranks, in place. Returns the call's result after its progress.
  int all_reduce();
  // Waits until the stream is idle; false if it hangs.
  bool ends() const;
  bool hangs() const;
  // The first number of the buffer.
  float value() const;
};

UniqueId new_id();
// Runs `body` on a thread for each rank.
void run_ranks(int size, const std::function<void(Rank&)>& body);

}  // namespace checks
