// Settings from the environment, the log, and random schedules.

#include "machine.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include <fcntl.h>
#include <unistd.h>

namespace sim {

long setting(const char* name, long fallback) {
  const char* text = getenv(name);
  return text == nullptr || *text == 0 ? fallback : atol(text);
}

std::string text_setting(const char* name) {
  const char* text = getenv(name);
  return text == nullptr ? "" : text;
}

// One write for each line, at the end of a file that several processes may share.
void note(int device, const char* event, const std::string& detail) {
  static const auto name = text_setting("SIM_LOG");
  static const int file = name.empty() ? -1 : open(name.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file >= 0) dprintf(file, "%d %d %s: %s\n", getpid(), device, event, detail.c_str());
}

// splitmix64.
static uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

long random_delay_us(uint64_t lane, uint64_t index) {
  static const bool is_on = !text_setting("SIM_SEED").empty();
  if (!is_on) return 0;
  static const uint64_t seed = static_cast<uint64_t>(setting("SIM_SEED", 0));
  static const long most = std::max(setting("SIM_DELAY_MAX_US", 2000), 0L);
  const uint64_t random = mix(mix(mix(seed) ^ lane) ^ index);
  // Three in four are not delayed, one in five by up to a tenth of the longest delay, the rest by anything.
  const uint64_t sort = random % 100, share = (random >> 8) % 1000;
  if (sort < 75) return 0;
  return static_cast<long>(share) * most / (sort < 95 ? 10000 : 1000);
}

void sleep_us(long microseconds) {
  if (microseconds > 0) usleep(static_cast<useconds_t>(microseconds));
}

}  // namespace sim
