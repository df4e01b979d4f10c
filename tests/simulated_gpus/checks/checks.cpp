// Checks of what the tests on simulated GPUs rest on without noticing it. Exit code 0: all passed.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>

#include <unistd.h>

#include "../machine/machine.h"

#define EXPECT(condition)                                                   \
  if (!(condition)) {                                                       \
    fprintf(stderr, "checks.cpp:%d: not true: %s\n", __LINE__, #condition); \
    exit(1);                                                                \
  }

// A freed block is given out again at once, and overwritten in stream order, unless another stream is recorded.
static void check_record_use(bool is_recorded) {
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
  if (is_recorded) EXPECT(sim::allocate(0, main, 512) == block);
}

int main() {
  alarm(30);
  check_record_use(true);
  check_record_use(false);
  printf("ok: record_use keeps a block for another stream, which reads garbage without it\n");
}
