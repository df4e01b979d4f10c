// A small runner: each check is a process of its own, with settings of its own.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "../machine/machine.h"

namespace checks {

using Settings = std::vector<std::pair<const char*, const char*>>;

// Runs `body` in a new process and prints whether it passed. A check that takes over 30 seconds fails.
void check(const char* name, const Settings& settings, const std::function<void()>& body);
// Ends the process of a check with a message.
[[noreturn]] void fail(const char* file, int line, const std::string& what);
// Waits up to 10 seconds for a condition. Returns whether it came true.
bool comes_true(const std::function<bool()>& condition);
// Whether a condition stays false for 200 milliseconds, as that of an operation that hangs.
bool stays_false(const std::function<bool()>& condition);
// Runs `body` in a process of its own, which is killed with this one. Returns its number.
int start_process(const std::function<void()>& body);
// Waits for a process; fails if it has failed.
void join_process(int process);

void check_machine();
void check_nccl();
void check_hosts();
void check_torch();

}  // namespace checks

#define EXPECT(condition) \
  if (!(condition)) checks::fail(__FILE__, __LINE__, #condition)
