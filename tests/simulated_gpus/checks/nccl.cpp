// NCCL between the threads of one process.

#include "nccl.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include <unistd.h>

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

void sum_and_end(Rank& rank) {
  EXPECT(rank.state() == Success);
  for (int i = 0; i < 100; i++) {
    rank.fill(static_cast<float>(rank.rank + i));
    EXPECT(rank.all_reduce() == Success);
    EXPECT(rank.ends() && rank.value() == static_cast<float>(rank.size * (rank.size - 1) / 2 + rank.size * i));
  }
  EXPECT(ncclCommFinalize(rank.comm) == InProgress);
  EXPECT(rank.state() == Success && ncclCommDestroy(rank.comm) == Success);
}

namespace {

void check_sum() { run_ranks(3, sum_and_end); }

void check_messages() {
  run_ranks(2, [](Rank& rank) {
    EXPECT(rank.state() == Success);
    const int peer = 1 - rank.rank;
    auto* received = static_cast<float*>(sim::allocate(rank.rank, rank.stream, 16));
    rank.fill(static_cast<float>(rank.rank));
    EXPECT(ncclGroupStart() == Success);
    EXPECT(ncclSend(rank.buffer, 4, Float32, peer, rank.comm, rank.stream) == Success);
    EXPECT(ncclRecv(received, 4, Float32, peer, rank.comm, rank.stream) == Success);
    EXPECT(ncclGroupEnd() == InProgress);
    EXPECT(rank.state() == Success && rank.ends());
    sim::Access access;
    EXPECT(received[3] == static_cast<float>(peer));
  });
}

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

void check_async_fault(int expected) {
  run_ranks(3, [&](Rank& rank) {
    EXPECT(rank.state() == Success);
    EXPECT(rank.all_reduce() == Success && rank.ends());
    const int result = rank.all_reduce();
    EXPECT(result == Success || rank.rank == 1);
    EXPECT(rank.hangs());
    EXPECT(rank.poll() == (rank.rank == 1 ? expected : Success));
    EXPECT(ncclCommAbort(rank.comm) == Success);
  });
}

void check_launch_fault() {
  run_ranks(2, [](Rank& rank) {
    EXPECT(rank.state() == Success);
    EXPECT(rank.all_reduce() == Success && rank.ends());
    EXPECT(ncclGroupStart() == Success);
    EXPECT(ncclAllReduce(rank.buffer, rank.buffer, 4, Float32, Sum, rank.comm, rank.stream) == Success);
    EXPECT(ncclGroupEnd() == (rank.rank == 0 ? UnhandledCudaError : InProgress));
    EXPECT(rank.rank == 0 || rank.state() == Success);
    EXPECT(rank.rank == 0 ? rank.ends() : rank.hangs());
    EXPECT(ncclCommAbort(rank.comm) == Success);
  });
}

void check_init_fault() {
  run_ranks(2, [](Rank& rank) {
    EXPECT(stays_false([&] { return rank.poll() != InProgress; }));
    EXPECT(ncclCommAbort(rank.comm) == Success);
  });
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
  int version = 0;
  EXPECT(ncclGetVersion(&version) == Success && version == 22703);
  EXPECT(ncclCommInitRankConfig(&comm, 1, id, 0, &newer) == InProgress);
  EXPECT(ncclCommAbort(comm) == Success);
  newer.blocking = 2;
  EXPECT(ncclCommInitRankConfig(&comm, 1, id, 0, &newer) == InvalidArgument);
  newer.blocking = 0;
  newer.magic = 0;
  EXPECT(ncclCommInitRankConfig(&comm, 1, id, 0, &newer) == InvalidArgument);
  EXPECT(strstr(ncclGetLastError(nullptr), "NCCL_CONFIG_INITIALIZER") != nullptr);
}

// The environment wins, so the call returns when the rank has joined.
void check_blocking() {
  const Config config;
  ncclComm* comm = nullptr;
  EXPECT(ncclCommInitRankConfig(&comm, 1, new_id(), 0, &config) == Success);
  EXPECT(ncclCommAbort(comm) == Success);
}

// The launch is later than the call, on a thread that the report counts. A last error is every thread's.
void check_launch_thread() {
  run_ranks(2, [](Rank& rank) {
    EXPECT(rank.state() == Success);
    EXPECT(ncclAllReduce(rank.buffer, rank.buffer, 4, Float32, Sum, rank.comm, rank.stream) == InProgress);
    EXPECT(sim::is_idle(rank.stream) && rank.poll() == InProgress);
    EXPECT(rank.state() == Success && rank.ends());
    EXPECT(ncclCommAbort(rank.comm) == Success);
  });
  std::thread([] { EXPECT(ncclGroupEnd() == InvalidUsage); }).join();
  EXPECT(strstr(ncclGetLastError(nullptr), "not in a group call") != nullptr);
}

void print_time() {
  run_ranks(2, [](Rank& rank) {
    EXPECT(rank.state() == Success);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 1000; i++) {
      EXPECT(ncclAllReduce(rank.buffer, rank.buffer, 4, Float32, Sum, rank.comm, rank.stream) == InProgress);
      while (rank.poll() == InProgress) continue;
      sim::synchronize(rank.stream, "time");
    }
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    if (rank.rank == 0) printf("    an all-reduce of 16 bytes takes %.0f us\n", took.count() / 1000);
    fflush(stdout);
  });
}

}  // namespace

void check_nccl() {
  const std::pair<const char*, const char*> gpus{"SIM_GPUS", "3"};
  check("three ranks sum", {gpus}, check_sum);
  check("three ranks sum on a random schedule", {gpus, {"SIM_SEED", "1"}, {"SIM_DELAY_MAX_US", "500"}}, check_sum);
  check("two ranks exchange messages", {gpus}, check_messages);
  check("calls that differ hang", {gpus}, check_mismatch);
  check("an abort frees only its rank", {gpus}, check_abort);
  check("a call before all have joined is refused", {gpus}, check_early_call);
  check("two ranks on a GPU are refused", {gpus}, [] { check_shared_gpu(InvalidUsage); });
  check("two ranks on a GPU are refused by 2.30", {gpus, {"SIM_NCCL_VERSION", "23007"}},
        [] { check_shared_gpu(InvalidUsage); });
  check("two ranks on a GPU are allowed",
        {gpus, {"SIM_NCCL_VERSION", "23007"}, {"NCCL_MULTI_RANK_GPU_ENABLE", "1"}}, [] { check_shared_gpu(Success); });
  check("fault remote", {gpus, {"SIM_NCCL_FAULT", "remote:rank=1,call=2"}}, [] { check_async_fault(RemoteError); });
  check("fault system", {gpus, {"SIM_NCCL_FAULT", "system:rank=1,call=2"}}, [] { check_async_fault(SystemError); });
  check("fault launch", {gpus, {"SIM_NCCL_FAULT", "launch:rank=0,call=2"}}, check_launch_fault);
  check("fault init", {gpus, {"SIM_NCCL_FAULT", "init:rank=1"}}, check_init_fault);
  check("a newer configuration is accepted", {gpus, {"SIM_NCCL_VERSION", "22703"}}, check_config);
  check("NCCL_COMM_BLOCKING overrides the configuration", {gpus, {"NCCL_COMM_BLOCKING", "1"}}, check_blocking);
  check("a group launches on a thread", {gpus, {"SIM_NCCL_LAUNCH_US", "300000"}}, check_launch_thread);
  check("time", {gpus}, print_time);
}

}  // namespace checks
