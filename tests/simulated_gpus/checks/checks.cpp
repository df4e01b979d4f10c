// Checks of what the tests on simulated GPUs rest on without noticing it. Exit code 0: all passed.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <utility>
#include <vector>

#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../machine/machine.h"
#include "../nccl/connection.h"

#define EXPECT(condition) \
  if (!(condition)) give_up(__LINE__, #condition)

namespace {

// Ends the process of a check.
[[noreturn]] void give_up(int line, const char* what) {
  fprintf(stderr, "checks.cpp:%d: not true: %s\n", line, what);
  _exit(1);
}

// Waits up to 10 seconds for a condition. Returns whether it came true.
bool comes_true(const std::function<bool()>& condition) {
  for (int i = 0; i < 10000; i++) {
    if (condition()) return true;
    usleep(1000);
  }
  return false;
}

using Settings = std::vector<std::pair<const char*, const char*>>;
bool has_failed = false;

// Each check is a process, with settings of its own, and fails after 30 seconds.
void check(const char* name, const Settings& settings, const std::function<void()>& body) {
  const int process = fork();
  if (process == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(30);
    for (auto& [key, value] : settings) setenv(key, value, 1);
    body();
    _exit(0);
  }
  int status = -1;
  waitpid(process, &status, 0);
  printf("%s: %s\n", status == 0 ? "ok" : "FAILED", name);
  fflush(stdout);
  has_failed |= status != 0;
}

// --- the machine ---

// A freed block is given out again at once, and overwritten in stream order, unless a use of another stream is recorded.
void check_record_use(bool is_recorded) {
  auto *main = sim::default_stream(0), *side = sim::new_stream(0);
  auto* block = sim::allocate(0, main, 512);
  sim::launch(main, "write", [=] { memset(block, 1, 512); });
  sim::synchronize(main, "check");
  std::promise<void> gate;
  sim::launch(side, "gate", [opened = gate.get_future().share()] { opened.wait(); });
  unsigned char seen = 0;
  sim::launch(side, "read", [&] { seen = *static_cast<unsigned char*>(block); });
  if (is_recorded) sim::record_use(block, side);
  sim::release(block);
  EXPECT((sim::allocate(0, main, 512) == block) == !is_recorded);
  gate.set_value();
  sim::synchronize(side, "check");
  EXPECT(seen == (is_recorded ? 1 : 0xff));
  if (is_recorded) EXPECT(comes_true([&] { return sim::allocate(0, main, 512) == block; }));
}

// --- NCCL ---

// What a rank has sent to another host gets there, unless SIM_NCCL_ABORT_CUTS drops it at the abort.
void check_abort(bool cuts) {
  using namespace sim_nccl;
  int ends[2];
  EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
  auto peer = connect_peer(File(ends[0]), 0, 1, true, std::make_shared<Inbox>(2));
  peer->post({Message::Kind::Post, {Channel::Send, 1}, {}, 0}, nullptr);
  peer->end(true);
  Message arrived;
  const Stop never{false};
  EXPECT(receive_all(ends[1], &arrived, sizeof arrived, never) == !cuts);
}

}  // namespace

int main() {
  check("record_use keeps a block for another stream", {}, [] { check_record_use(true); });
  check("without record_use the other stream reads garbage", {}, [] { check_record_use(false); });
  check("what was sent gets to another host", {}, [] { check_abort(false); });
  // The proxy holds back for longer than a busy machine takes to get to the abort.
  check("an abort cuts it off", {{"SIM_NCCL_ABORT_CUTS", "1"}, {"SIM_NCCL_HOLD_US", "5000000"}},
        [] { check_abort(true); });
  return has_failed ? 1 : 0;
}
