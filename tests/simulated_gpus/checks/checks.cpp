// Checks of the fixture itself. Exit code 0: all passed.

#include "checks.h"

#include <cstdio>
#include <cstdlib>

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace checks {

static int failures = 0;

int start_process(const std::function<void()>& body) {
  const int process = fork();
  if (process != 0) return process;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  alarm(30);
  body();
  _exit(0);
}

static int wait_for_process(int process) {
  int status = -1;
  waitpid(process, &status, 0);
  return status;
}

void join_process(int process) { EXPECT(wait_for_process(process) == 0); }

void check(const char* name, const Settings& settings, const std::function<void()>& body) {
  const int status = wait_for_process(start_process([&] {
    for (auto& [key, value] : settings) setenv(key, value, 1);
    body();
  }));
  printf("%s: %s\n", status == 0 ? "ok" : WIFSIGNALED(status) ? "KILLED" : "FAILED", name);
  fflush(stdout);
  failures += status != 0;
}

void fail(const char* file, int line, const std::string& what) {
  fprintf(stderr, "%s:%d: not true: %s\n", file, line, what.c_str());
  _exit(1);
}

bool comes_true(const std::function<bool()>& condition) {
  for (int i = 0; i < 10000; i++) {
    if (condition()) return true;
    usleep(1000);
  }
  return false;
}

bool stays_false(const std::function<bool()>& condition) {
  for (int i = 0; i < 200; i++) {
    if (condition()) return false;
    usleep(1000);
  }
  return true;
}

}  // namespace checks

int main() {
  checks::check_machine();
  checks::check_nccl();
  checks::check_hosts();
  checks::check_torch();
  return checks::failures == 0 ? 0 : 1;
}
