// NCCL between processes, on one host and on two.

#include <cstdlib>

#include <signal.h>
#include <unistd.h>

#include "nccl.h"

namespace checks {
namespace {

using namespace sim_nccl;

// Lets one of two processes go on when the other says so.
struct Steps {
  int to_other[2], from_other[2];
  void tell() const { EXPECT(write(to_other[1], "x", 1) == 1); }
  void await() const {
    char byte;
    EXPECT(read(from_other[0], &byte, 1) == 1);
  }
};

// Runs rank 0 on host "a" and rank 1 on `other_host`, in processes of their own.
void run_processes(const char* other_host, const std::function<void(Rank&, const Steps&)>& first,
                   const std::function<void(Rank&, const Steps&)>& second) {
  int ids[2], there[2], back[2];
  EXPECT(pipe(ids) == 0 && pipe(there) == 0 && pipe(back) == 0);
  const int other = start_process([&] {
    setenv("SIM_HOST", other_host, 1);
    setenv("CUDA_VISIBLE_DEVICES", "1", 1);
    UniqueId id;
    EXPECT(read(ids[0], &id, sizeof id) == sizeof id);
    Rank rank(1, 2, id, 0);
    second(rank, {{back[0], back[1]}, {there[0], there[1]}});
  });
  setenv("SIM_HOST", "a", 1);
  setenv("CUDA_VISIBLE_DEVICES", "0", 1);
  const auto id = new_id();
  EXPECT(write(ids[1], &id, sizeof id) == sizeof id);
  Rank rank(0, 2, id, 0);
  first(rank, {{there[0], there[1]}, {back[0], back[1]}});
  join_process(other);
}

// The first rank ends its communicator as soon as its operation has ended. The other may still wait for the data.
void sum_and_abort(Rank& rank, const Steps& steps) {
  EXPECT(rank.state() == Success);
  rank.fill(1);
  EXPECT(rank.all_reduce() == Success && rank.ends());
  EXPECT(ncclCommAbort(rank.comm) == Success);
  steps.await();
}

void is_cut_off(Rank& rank, const Steps& steps) {
  EXPECT(rank.state() == Success);
  rank.fill(1);
  const int result = rank.all_reduce();
  EXPECT(result == Success || result == RemoteError);
  EXPECT(comes_true([&] { return rank.poll() == RemoteError; }));
  EXPECT(!sim::is_idle(rank.stream));
  EXPECT(ncclCommAbort(rank.comm) == Success && rank.ends());
  steps.tell();
}

void gets_all(Rank& rank, const Steps& steps) {
  EXPECT(rank.state() == Success);
  rank.fill(1);
  EXPECT(rank.all_reduce() == Success && rank.ends() && rank.value() == 2);
  EXPECT(ncclCommFinalize(rank.comm) == InProgress);
  EXPECT(ncclCommDestroy(rank.comm) == Success);
  steps.tell();
}

// Calls an operation that the other rank will not end.
void sees_end(Rank& rank, bool is_other_host) {
  EXPECT(rank.state() == Success);
  EXPECT(rank.all_reduce() == Success || is_other_host);
  if (is_other_host) {
    EXPECT(comes_true([&] { return rank.poll() == RemoteError; }));
  } else {
    EXPECT(rank.hangs() && rank.poll() == Success);
  }
  EXPECT(ncclCommAbort(rank.comm) == Success && rank.ends());
}

// Its peer comes after the abort. An operation that began before could still give its data to the peer: what withdraws
// them travels behind them.
void aborts(Rank& rank, const Steps& steps) {
  EXPECT(rank.state() == Success);
  EXPECT(ncclCommAbort(rank.comm) == Success && rank.ends());
  steps.tell();
}

void dies(Rank& rank, const Steps&) {
  EXPECT(rank.state() == Success);
  _exit(0);
}

}  // namespace

void check_hosts() {
  // The proxy holds back for longer than a busy machine takes to get to the abort.
  const std::pair<const char*, const char*> gpus{"SIM_GPUS", "2"}, cuts{"SIM_NCCL_ABORT_CUTS", "1"},
      hold{"SIM_NCCL_HOLD_US", "5000000"};
  check("an abort after the end cuts off another host", {gpus, cuts, hold},
        [] { run_processes("b", sum_and_abort, is_cut_off); });
  check("an abort after the end cuts nothing off on the same host", {gpus, cuts, hold},
        [] { run_processes("a", sum_and_abort, gets_all); });
  for (const bool is_other_host : {false, true}) {
    const char* host = is_other_host ? "b" : "a";
    auto sees = [=](Rank& rank, const Steps&) { sees_end(rank, is_other_host); };
    auto sees_abort = [=](Rank& rank, const Steps& steps) {
      steps.await();
      sees_end(rank, is_other_host);
    };
    check(is_other_host ? "an abort is an error on another host" : "an abort frees only its rank, also of processes",
          {gpus}, [=] { run_processes(host, sees_abort, aborts); });
    check(is_other_host ? "a process that dies is an error on another host" : "one that dies leaves its host waiting",
          {gpus}, [=] { run_processes(host, sees, dies); });
  }
}

}  // namespace checks
