// libtorch's device type CUDA.

#include <atomic>
#include <barrier>
#include <functional>
#include <future>
#include <thread>

#include <ATen/ATen.h>
#include <dlfcn.h>

#include "checks.h"

namespace checks {
namespace {

using at::Tensor;
const at::Device gpu("cuda:0");

bool throws(const char* text, const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return std::string(error.what()).find(text) != std::string::npos;
  }
  return false;
}

// Training first: a plan of one mode must not serve the other.
void check_batch_norm() {
  const auto input = at::rand({4, 3, 5, 5}), weight = at::rand(3), bias = at::rand(3);
  for (bool is_training : {true, false}) {
    auto mean = at::rand(3), variance = at::rand(3);
    auto mean_there = mean.to(gpu), variance_there = variance.to(gpu);
    auto [output, saved_mean, saved_scale] = at::native_batch_norm(
        input.to(gpu), weight.to(gpu), bias.to(gpu), mean_there, variance_there, is_training, 0.1, 1e-5);
    auto [expected, expected_mean, expected_scale] =
        at::native_batch_norm(input, weight, bias, mean, variance, is_training, 0.1, 1e-5);
    EXPECT(at::equal(output.cpu(), expected));
    EXPECT(at::equal(mean_there.cpu(), mean));
    EXPECT(at::equal(saved_mean.cpu(), is_training ? expected_mean : mean));
    EXPECT(at::allclose(saved_scale.cpu(), is_training ? expected_scale : (variance + 1e-5).rsqrt()));
  }
}

void check_shapes_from_data() {
  const auto numbers = at::arange(20, at::kFloat).to(gpu);
  EXPECT(at::nonzero(numbers > 5).size(0) == 14);
  EXPECT(numbers.masked_select(numbers > 5).sum().item<float>() == 175);
  EXPECT(at::equal(numbers, numbers.clone()) && !at::equal(numbers, numbers + 1));
}

void check_errors() {
  const auto numbers = at::ones(4).to(gpu);
  EXPECT(throws("must be a matrix", [&] { at::mm(numbers, numbers); }));
  EXPECT(throws("at least two devices, cuda:0 and cpu", [&] { numbers.add(at::ones(4)); }));
  EXPECT(throws("at least two devices", [&] { numbers.add(at::ones(4).to(at::Device("cuda:1"))); }));
  // What only the data shows fails later, and the device with it.
  const auto found = numbers.index_select(0, at::tensor({100}, at::kLong).to(gpu));
  EXPECT(throws("device-side assert triggered", [&] { found.cpu(); }));
  EXPECT(throws("device-side assert triggered", [&] { numbers.cpu(); }));
}

// While the stream is held up, the host goes on. The copy then reads pinned memory as it is.
void check_copy(bool is_pinned) {
  auto source = at::ones(4);
  if (is_pinned) source = source.pin_memory();
  EXPECT(source.is_pinned() == is_pinned);
  auto target = at::zeros(4).to(gpu);
  std::promise<void> gate;
  sim::launch(sim::current_stream(0), "gate", [opened = gate.get_future().share()] { opened.wait(); });
  target.copy_(source, true);
  const auto sum = target.sum();
  source.fill_(2);
  gate.set_value();
  EXPECT(sum.item<float>() == (is_pinned ? 8 : 4));
}

// The first thread loads the library, and the second one comes meanwhile.
void check_linear_algebra() {
  std::atomic<int> failed{0};
  std::barrier<> both(2);
  auto decompose = [&] {
    const auto matrix = at::eye(4).to(gpu);
    both.arrive_and_wait();
    if (throws("lazy wrapper should be called at most once", [&] { at::linalg_qr(matrix); })) failed++;
  };
  std::thread other(decompose);
  decompose();
  other.join();
  EXPECT(failed == 1);
  EXPECT(std::get<1>(at::linalg_qr(at::eye(4).to(gpu))).sum().item<float>() == 4);
}

}  // namespace

void check_torch() {
  auto check_with_cuda = [](const char* name, const std::function<void()>& body) {
    check(name, {{"SIM_GPUS", "2"}}, [&] {
      EXPECT(dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) != nullptr);
      body();
    });
  };
  check_with_cuda("batch norm has saved statistics in both modes", check_batch_norm);
  check_with_cuda("shapes that depend on the data", check_shapes_from_data);
  check_with_cuda("errors of callers and of devices", check_errors);
  check_with_cuda("pinned memory is read by the copy", [] { check_copy(true); });
  check_with_cuda("pageable memory is read at once", [] { check_copy(false); });
  check_with_cuda("linear algebra is loaded without a lock", check_linear_algebra);
}

}  // namespace checks
