// NCCL between the threads of one process.

#include "nccl.h"

#include <atomic>
#include <thread>

namespace checks {

using namespace sim_nccl;

Rank::Rank(int rank, int size, const UniqueId& id, int device) : rank(rank), size(size) {
  device = device < 0 ? rank : device;
  sim::set_device(device);
  stream = sim::default_stream(device);
  buffer = static_cast<float*>(sim::allocate(device, stream, count * sizeof(float)));
  const Config config;
  EXPECT(ncclCommInitRankConfig(&comm, size, id, rank, &config) == InProgress);
}

int Rank::poll() const {
  int state = -1;
  EXPECT(ncclCommGetAsyncError(comm, &state) == Success);
  return state;
}

int Rank::state() const {
  int state = InProgress;
  comes_true([&] { return (state = poll()) != InProgress; });
  return state;
}

void Rank::fill(float value) const {
  sim::launch(stream, "fill", [to = buffer, count = count, value] {
    for (size_t i = 0; i < count; i++) to[i] = value;
  });
}

int Rank::all_reduce() {
  const int result = ncclAllReduce(buffer, buffer, count, Float32, Sum, comm, stream);
  return result == InProgress ? state() : result;
}

bool Rank::ends() const {
  return comes_true([&] { return sim::is_idle(stream); });
}

bool Rank::hangs() const {
  return stays_false([&] { return sim::is_idle(stream); });
}

float Rank::value() const {
  sim::Access access;
  return buffer[0];
}

UniqueId new_id() {
  UniqueId id;
  EXPECT(ncclGetUniqueId(&id) == Success);
  return id;
}

void run_ranks(int size, const std::function<void(Rank&)>& body) {
  const auto id = new_id();
  std::vector<std::thread> threads;
  for (int i = 0; i < size; i++) {
    threads.emplace_back([&, i] {
      Rank rank(i, size, id);
      body(rank);
    });
  }
  for (auto& thread : threads) thread.join();
}

namespace {

void check_mismatch() {
  run_ranks(2, [](Rank& rank) {
    EXPECT(rank.state() == Success);
    rank.count -= static_cast<size_t>(rank.rank);
    EXPECT(rank.all_reduce() == Success);
    EXPECT(rank.hangs());
    EXPECT(ncclCommAbort(rank.comm) == Success);
    EXPECT(rank.ends());
  });
}

// Rank 0 aborts what rank 1 has not come to.
void check_abort() {
  std::atomic<bool> is_aborted{false};
  run_ranks(2, [&](Rank& rank) {
    EXPECT(rank.state() == Success);
    if (rank.rank == 0) {
      EXPECT(rank.all_reduce() == Success);
      EXPECT(rank.hangs());
      EXPECT(ncclCommAbort(rank.comm) == Success);
      EXPECT(rank.ends());
      is_aborted = true;
    } else {
      EXPECT(comes_true([&] { return is_aborted.load(); }));
      EXPECT(rank.all_reduce() == Success);
      EXPECT(rank.hangs() && rank.poll() == Success);
      EXPECT(ncclCommAbort(rank.comm) == Success);
    }
  });
}

void check_early_call() {
  const auto id = new_id();
  Rank rank(0, 2, id);  // the other never joins
  EXPECT(ncclAllReduce(rank.buffer, rank.buffer, 4, Float32, Sum, rank.comm, rank.stream) == InvalidArgument);
  EXPECT(stays_false([&] { return rank.poll() != InProgress; }));
  EXPECT(ncclCommAbort(rank.comm) == Success);
}

void check_shared_gpu(int expected) {
  const auto id = new_id();
  Rank first(0, 2, id, 0), second(1, 2, id, 0);
  EXPECT(first.state() == expected && second.state() == expected);
}

// A structure of a newer version is longer; NCCL reads what it knows.
void check_config() {
  struct Newer : Config {
    int more[8] = {};
  } newer;
  newer.size = sizeof newer;
  newer.version = 23007;
  ncclComm* comm = nullptr;
  const auto id = new_id();
  EXPECT(ncclCommInitRankConfig(&comm, 1, id, 0, &newer) == InProgress);
  EXPECT(ncclCommAbort(comm) == Success);
  newer.blocking = 2;
  EXPECT(ncclCommInitRankConfig(&comm, 1, id, 0, &newer) == InvalidArgument);
  newer.blocking = 0;
  newer.magic = 0;
  EXPECT(ncclCommInitRankConfig(&comm, 1, id, 0, &newer) == InvalidArgument);
}

}  // namespace

void check_nccl() {
  const std::pair<const char*, const char*> gpus{"SIM_GPUS", "2"}, newer{"SIM_NCCL_VERSION", "23007"};
  check("calls that differ hang", {gpus}, check_mismatch);
  check("an abort frees only its rank", {gpus}, check_abort);
  check("a call before all have joined is refused", {gpus}, check_early_call);
  check("two ranks on a GPU are refused", {gpus}, [] { check_shared_gpu(InvalidUsage); });
  check("two ranks on a GPU are refused by 2.30", {gpus, newer}, [] { check_shared_gpu(InvalidUsage); });
  check("two ranks on a GPU are allowed", {gpus, newer, {"NCCL_MULTI_RANK_GPU_ENABLE", "1"}},
        [] { check_shared_gpu(Success); });
  check("a newer configuration is accepted", {gpus}, check_config);
}

}  // namespace checks
