// Functions of libtorch that tch lacks, behind a C ABI. Each is declared beside its wrapper in ffi/*.rs.
//
// Rules of this file: Use no CUDA header and no symbol of libtorch_cuda. The binary links libtorch_cpu and libc10
// only, and accesses CUDA through c10's registry once libtorch_cuda is loaded. No C++ exception may reach Rust: every
// function that can fail returns null for success, or a message to be freed with ddp_free_message.

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Logging.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/custom_class.h>

#include "guarded.h"

namespace {

constexpr auto kCUDA = c10::DeviceType::CUDA;

c10::impl::VirtualGuardImpl cuda() { return c10::impl::VirtualGuardImpl(kCUDA); }

c10::Device cuda_device(int index) {
  return c10::Device(kCUDA, static_cast<c10::DeviceIndex>(index));
}

// Calls Rust when the gradient of a parameter is complete. Rust returns null, or the reason why backward must fail.
using OnGrad = const char* (*)(void* context, size_t index);
struct GradHook final : torch::autograd::PostAccumulateGradHook {
  OnGrad call;
  void* context;
  size_t index;
  GradHook(OnGrad call, void* context, size_t index)
      : call(call), context(context), index(index) {}
  void operator()(const torch::autograd::Variable&) override {
    if (const char* problem = call(context, index)) throw std::runtime_error(problem);
  }
};

// Rust's linear function. Returns a new tensor, or null after a failure: Rust keeps the error, and writes its text to
// `reason`.
using Apply = at::Tensor* (*)(void* context, at::Tensor* input, bool transposed, char* reason,
                              size_t capacity);
using Release = void (*)(void* context);

// Owns `context`, Rust's data for as long as a graph may call the function.
struct LinearMap : torch::CustomClassHolder {
  LinearMap(Apply apply, Release release, void* context)
      : apply(apply), release(release), context(context) {}
  ~LinearMap() override { release(context); }

  const Apply apply;
  const Release release;
  void* const context;
};

// A linear function or, if `transposed`, its transpose. The backward of each is the other, also for gradients of
// gradients.
struct Linear : torch::autograd::Function<Linear> {
  static at::Tensor forward(torch::autograd::AutogradContext* node, const at::Tensor& input,
                            const c10::intrusive_ptr<LinearMap>& map, bool transposed) {
    node->saved_data["map"] = at::IValue::make_capsule(map);
    node->saved_data["transposed"] = transposed;
    at::Tensor handle = input;
    char reason[512] = "";
    std::unique_ptr<at::Tensor> output(
        map->apply(map->context, &handle, transposed, reason, sizeof reason));
    if (output == nullptr) throw std::runtime_error(reason);
    return *output;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* node,
                                                 const torch::autograd::variable_list& gradients) {
    auto capsule = node->saved_data["map"].toCapsule();
    auto map = c10::static_intrusive_pointer_cast<LinearMap>(capsule);
    auto transposed = node->saved_data["transposed"].toBool();
    return {apply(gradients[0], map, !transposed), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

extern "C" {

void ddp_free_message(char* message) { free(message); }

// With `false`, backward runs on the calling thread for every device, so that its errors and hooks stay on the thread
// of their rank. Thread-local, like torch.autograd.set_multithreading_enabled.
void ddp_set_multithreading_enabled(bool enabled) {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(enabled);
}

// Replaces the stack trace in libtorch's error texts by a hint on how to get it.
void ddp_hide_stack_traces() {
  c10::SetStackTraceFetcher([] { return std::string("set RUST_BACKTRACE=1 for its frames"); });
}

// The complete autocast state of a thread.
struct AutocastState {
  bool enabled;
  c10::ScalarType dtype;
  bool cache_enabled;
};

// Sets the calling thread's state for one type of device. Replaces `state` by the previous state.
char* ddp_autocast_swap(bool on_cuda, AutocastState* state) {
  return guarded([&] {
    auto device = on_cuda ? kCUDA : c10::DeviceType::CPU;
    AutocastState before{at::autocast::is_autocast_enabled(device),
                         at::autocast::get_autocast_dtype(device),
                         at::autocast::is_autocast_cache_enabled()};
    at::autocast::set_autocast_enabled(device, state->enabled);
    at::autocast::set_autocast_dtype(device, state->dtype);
    at::autocast::set_autocast_cache_enabled(state->cache_enabled);
    *state = before;
  });
}

// A tensor's memory and shape.
struct TensorFacts {
  // Null without memory, as in a sparse tensor.
  void* data;
  size_t numel;
  const int64_t* sizes;
  size_t dim;
  // Whether the memory holds the elements one after the other, with their values.
  bool is_plain;
};

// Looks at a tensor once, and allocates nothing.
char* ddp_tensor_facts(at::Tensor* tensor, TensorFacts* facts) {
  return guarded([&] {
    *facts = {};
    if (!tensor->defined()) return;
    facts->numel = tensor->numel();
    facts->sizes = tensor->sizes().data();
    facts->dim = tensor->dim();
    if (tensor->layout() != at::kStrided || !tensor->has_storage()) return;
    facts->data = tensor->data_ptr();
    facts->is_plain = tensor->is_contiguous() && !tensor->is_conj() && !tensor->is_neg();
  });
}

// Sets parameter.grad = grad without a copy, or parameter.grad = None if `grad` is undefined.
char* ddp_set_grad(at::Tensor* parameter, at::Tensor* grad) {
  return guarded([&] { parameter->mutable_grad() = *grad; });
}

// Runs Tensor.retain_grad(). tch does not offer it.
char* ddp_retain_grad(at::Tensor* tensor) {
  return guarded([&] { tensor->retain_grad(); });
}

// Runs Tensor.backward(retain_graph=...). tch does not offer the option.
char* ddp_backward(at::Tensor* loss, bool retain_graph) {
  return guarded([&] { loss->backward({}, retain_graph); });
}

// Makes backward call `call(context, index)` on its thread whenever it has added to parameter.grad. A null `call`
// removes the hook, if it has this context. Follows register_post_accumulate_grad_hook, with one hook per parameter.
char* ddp_set_grad_hook(at::Tensor* parameter, OnGrad call, void* context, size_t index) {
  return guarded([&] {
    std::unique_ptr<torch::autograd::PostAccumulateGradHook> hook;
    if (call != nullptr) {
      hook = std::make_unique<GradHook>(call, context, index);
    } else {
      auto& there = torch::autograd::impl::post_acc_grad_hooks(*parameter);
      auto* ours = dynamic_cast<GradHook*>(there.get());
      if (ours == nullptr || ours->context != context) return;  // another hook has replaced it
    }
    torch::autograd::impl::set_post_acc_grad_hooks(*parameter, std::move(hook));
  });
}

// Returns whether memcpy can copy `from` to `to`. For small tensors it takes less time than libtorch's overhead.
static bool small_and_alike(const at::Tensor& from, const at::Tensor& to) {
  return from.layout() == at::kStrided && from.is_cpu() && to.is_cpu() && from.nbytes() <= (64 << 10) &&
         from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes() &&
         from.is_contiguous() && to.is_contiguous() && !from.is_conj() && !from.is_neg();
}

// Moves parameter.grad to `to`, if it is not there already. Without a gradient, fills `to` with zeros.
char* ddp_move_grad(at::Tensor* parameter, at::Tensor* to) {
  return guarded([&] {
    at::Tensor& grad = parameter->mutable_grad();
    if (grad.defined() && grad.has_storage() && grad.data_ptr() == to->data_ptr()) return;
    c10::AutoGradMode no_grad(false);
    if (!grad.defined()) {
      to->zero_();
    } else if (small_and_alike(grad, *to)) {
      memcpy(to->data_ptr(), grad.const_data_ptr(), grad.nbytes());
    } else {
      // An embedding's gradient may be sparse. It can be added to a bucket, but not copied there.
      to->copy_(grad.layout() == at::kStrided ? grad : grad.to_dense());
    }
    grad = *to;
  });
}

// Makes `flat`, a tensor of one dimension, share the memory of parameter.grad, which stays where it is. Without a
// gradient it becomes zeros.
char* ddp_adopt_grad(at::Tensor* parameter, at::Tensor* flat) {
  return guarded([&] {
    at::Tensor& grad = parameter->mutable_grad();
    if (grad.defined() && grad.has_storage() && grad.data_ptr() == flat->data_ptr()) return;
    c10::AutoGradMode no_grad(false);
    if (!grad.defined()) {
      grad = at::zeros_like(*parameter, at::MemoryFormat::Contiguous);
    } else if (grad.layout() != at::kStrided) {
      grad = grad.to_dense();  // an embedding's gradient may be sparse
    } else if (!grad.is_contiguous() || grad.storage().use_count() > 1) {
      // Another gradient may have the same memory, which will be reduced in place.
      grad = grad.clone(at::MemoryFormat::Contiguous);
    }
    flat->set_data(grad.view({-1}));
  });
}

// Returns whether another tensor has the same memory, or memory in the same allocation.
bool ddp_shares_memory(at::Tensor* tensor) { return tensor->storage().use_count() > 1; }

// Computes destination += alpha * source in one pass, outside autograd, like torch.optim.SGD.
char* ddp_add_scaled(at::Tensor* destination, at::Tensor* source, double alpha) {
  return guarded([&] {
    c10::AutoGradMode no_grad(false);
    destination->add_(*source, alpha);
  });
}

// Makes `view` the elements from `start` on of `whole`, which has one dimension. Unlike narrow, it makes no new tensor.
char* ddp_set_view(at::Tensor* view, at::Tensor* whole, int64_t start, int64_t len) {
  return guarded([&] {
    TORCH_CHECK(whole->is_contiguous() && view->options().type_equal(whole->options()) &&
                    start >= 0 && len >= 0 && start + len <= whole->numel(),
                "elements ", start, " to ", start + len, " of a tensor of ", whole->numel());
    auto* tensor = view->unsafeGetTensorImpl();
    tensor->set_storage_keep_dtype(whole->storage());
    tensor->set_storage_offset(whole->storage_offset() + start);
    tensor->set_sizes_contiguous({len});
  });
}

// --- whole lists of tensors in one call: the kernels of optimizers ------------------------------

using TensorList = std::vector<at::Tensor>;

// Creates a list of the same tensors, without copies. `tensors_of` is in c10d.cpp.
char* ddp_tensor_list_new(at::Tensor** tensors, size_t len, TensorList** list) {
  return guarded([&] {
    *list = new TensorList(tensors_of(tensors, len));
  });
}

void ddp_tensor_list_free(TensorList* list) { delete list; }

// Marks each tensor as written to: a graph that saved one then refuses to run backward. In-place operations do this for
// their own tensors and views of them, which these are not.
char* ddp_bump_versions(TensorList* tensors) {
  return guarded([&] {
    for (auto& tensor : *tensors) torch::autograd::impl::bump_version(tensor);
  });
}

// The steps of fused.rs.
struct SgdStep {
  double lr, weight_decay, momentum, dampening;
  bool nesterov, is_first_step;
};

struct AdamWStep {
  double lr, beta1, beta2, weight_decay, eps;
};

// Makes a step of SGD. The lists are parameters, gradients and momentum buffers. Without momentum the last is empty.
char* ddp_fused_sgd(TensorList* const* lists, const SgdStep* step) {
  return guarded([&] {
    c10::AutoGradMode no_grad(false);
    at::_fused_sgd_(*lists[0], *lists[1], *lists[2], step->weight_decay, step->momentum, step->lr,
                    step->dampening, step->nesterov, /*maximize=*/false, step->is_first_step);
  });
}

// Makes a step of AdamW. The lists are parameters, gradients, their averages, those of their squares, and the numbers of
// steps, which already include this step, as in torch.optim.
char* ddp_fused_adamw(TensorList* const* lists, const AdamWStep* step) {
  return guarded([&] {
    c10::AutoGradMode no_grad(false);
    at::_fused_adamw_(*lists[0], *lists[1], *lists[2], *lists[3], /*max_exp_avg_sqs=*/{}, *lists[4],
                      step->lr, step->beta1, step->beta2, step->weight_decay, step->eps,
                      /*amsgrad=*/false, /*maximize=*/false);
  });
}

// Computes the 2-norm of all tensors together like torch.nn.utils.get_total_norm: the norm of their norms.
char* ddp_total_norm(TensorList* tensors, at::Tensor** norm) {
  return guarded([&] {
    c10::AutoGradMode no_grad(false);
    *norm = new at::Tensor(at::linalg_vector_norm(at::stack(at::_foreach_norm(*tensors))));
  });
}

// Multiplies all gradients by `inv_scale`, and sets `found_inf` to 1 if one of them is not finite.
char* ddp_amp_unscale(TensorList* gradients, at::Tensor* found_inf, at::Tensor* inv_scale) {
  return guarded([&] {
    c10::AutoGradMode no_grad(false);
    at::_amp_foreach_non_finite_check_and_unscale_(*gradients, *found_inf, *inv_scale);
  });
}

// Multiplies each tensor by `factor`.
char* ddp_scale_all(TensorList* tensors, at::Tensor* factor) {
  return guarded([&] {
    c10::AutoGradMode no_grad(false);
    at::_foreach_mul_(*tensors, *factor);
  });
}

// Applies Rust's function to `input` under autograd. Takes over `context`, even on failure.
char* ddp_linear(at::Tensor* input, Apply apply, Release release, void* context,
                 at::Tensor** output) {
  return guarded([&] {
    auto map = c10::make_intrusive<LinearMap>(apply, release, context);
    *output = new at::Tensor(Linear::apply(*input, map, false));
  });
}

// --- the process's CPU generator -------------------------------------------------------------

// Makes a tensor of Rust's bytes without a copy. Calls `release` with `context` when the last tensor over them is
// freed.
char* ddp_from_bytes(
    void* bytes, size_t len, Release release, void* context, at::Tensor** tensor) {
  return guarded([&] {
    *tensor = new at::Tensor(at::from_blob(
        bytes, {static_cast<int64_t>(len)}, [=](void*) { release(context); }, at::kByte));
  });
}

// Exchanges the states of the process's CPU generator and of `own`, which is for the CPU, too.
char* ddp_cpu_rng_swap(at::Generator* own) {
  return guarded([&] {
    auto generator = at::globalContext().defaultGenerator(at::kCPU);
    std::lock_guard<std::mutex> lock(generator.mutex());
    auto before = generator.get_state();
    generator.set_state(own->get_state());
    own->set_state(before);
  });
}

// --- generators of a rank's own ----------------------------------------------------------------

// Creates a generator for a GPU, or for the CPU if `gpu` is -1. It is cloned from the device's default generator, so
// that no CUDA header is needed.
char* ddp_generator_new(int gpu, at::Generator** generator) {
  return guarded([&] {
    auto device = gpu < 0 ? c10::Device(at::kCPU) : cuda_device(gpu);
    auto original = at::globalContext().defaultGenerator(device);
    std::lock_guard<std::mutex> lock(original.mutex());
    *generator = new at::Generator(original.clone());
  });
}

void ddp_generator_free(at::Generator* generator) { delete generator; }

char* ddp_generator_seed(at::Generator* generator, uint64_t seed) {
  return guarded([&] {
    std::lock_guard<std::mutex> lock(generator->mutex());
    generator->set_current_seed(seed);
  });
}

char* ddp_generator_bernoulli(at::Generator* generator, at::Tensor* tensor, double p) {
  return guarded([&] {
    c10::AutoGradMode no_grad(false);
    tensor->bernoulli_(p, *generator);
  });
}

char* ddp_generator_exponential(at::Generator* generator, at::Tensor* tensor) {
  return guarded([&] {
    c10::AutoGradMode no_grad(false);
    tensor->exponential_(1, *generator);
  });
}

// --- CUDA, once libtorch_cuda is loaded --------------------------------------------------------

// Returns the number of CUDA devices, or -1 while libtorch_cuda is not loaded.
int ddp_cuda_device_count() {
  auto* impl = c10::impl::device_guard_impl_registry[static_cast<size_t>(kCUDA)].load();
  return impl == nullptr ? -1 : static_cast<int>(impl->deviceCount());
}

// Returns the version of CUDA that libtorch_cuda was built for, such as 13000. Call it once libtorch_cuda is loaded.
char* ddp_cuda_version(long* version) {
  return guarded([&] { *version = at::detail::getCUDAHooks().versionCUDART(); });
}

// Sets the calling thread's device. Follows torch.cuda.set_device.
char* ddp_cuda_set_device(int index) {
  return guarded([&] { cuda().setDevice(cuda_device(index)); });
}

// Returns the cudaStream_t of this thread's current stream on the device.
char* ddp_cuda_current_stream(int index, void** stream) {
  return guarded([&] { *stream = cuda().getStream(cuda_device(index)).native_handle(); });
}

// Creates an event with or without a time. A time costs the device a little.
char* ddp_cuda_event_new(bool timed, c10::Event** event) {
  const auto flag = timed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT;
  return guarded([&] { *event = new c10::Event(kCUDA, flag); });
}

// libtorch sets the thread's device back after it has destroyed the event. On a thread without a device, that would
// start a context on the first GPU, so the event's device becomes the thread's.
void ddp_cuda_event_free(c10::Event* event) {
  if (event->was_marked_for_recording()) cuda().uncheckedSetDevice(event->device());
  delete event;
}

// Records the event on the device's current stream.
char* ddp_cuda_event_record(c10::Event* event, int index) {
  return guarded([&] { event->record(cuda().getStream(cuda_device(index))); });
}

// Sets `done` to whether the device has passed the event. Does not wait.
char* ddp_cuda_event_query(c10::Event* event, bool* done) {
  return guarded([&] { *done = event->query(); });
}

// Computes the milliseconds from `earlier` to `event`. Both must record times, and the device must have passed them.
char* ddp_cuda_event_since(c10::Event* event, c10::Event* earlier, double* milliseconds) {
  return guarded([&] { *milliseconds = earlier->elapsedTime(*event); });
}

// Makes the device's current stream wait for the event. The host does not wait.
char* ddp_cuda_event_block(c10::Event* event, int index) {
  return guarded([&] { event->block(cuda().getStream(cuda_device(index))); });
}

// Takes the next stream of libtorch's pool, which has 32 of each priority for a device.
char* ddp_cuda_stream_from_pool(int index, bool high_priority, c10::Stream** stream) {
  return guarded([&] {
    *stream = new c10::Stream(cuda().getStreamFromGlobalPool(cuda_device(index), high_priority));
  });
}

char* ddp_cuda_stream_default(int index, c10::Stream** stream) {
  return guarded([&] { *stream = new c10::Stream(cuda().getDefaultStream(cuda_device(index))); });
}

char* ddp_cuda_stream_current(int index, c10::Stream** stream) {
  return guarded([&] { *stream = new c10::Stream(cuda().getStream(cuda_device(index))); });
}

void ddp_cuda_stream_free(c10::Stream* stream) { delete stream; }

// Makes the stream and its device the current ones of this thread.
char* ddp_cuda_stream_set(const c10::Stream* stream) {
  return guarded([&] {
    cuda().setDevice(stream->device());
    cuda().exchangeStream(*stream);
  });
}

// Makes `stream` this thread's current stream, and replaces `stream` by the previous one.
char* ddp_cuda_stream_swap(c10::Stream* stream) {
  return guarded([&] { *stream = cuda().exchangeStream(*stream); });
}

// Makes `stream` wait for all that `earlier` has been given so far. The host does not wait.
char* ddp_cuda_stream_wait(const c10::Stream* stream, const c10::Stream* earlier) {
  return guarded([&] {
    c10::Event event(kCUDA);
    event.record(*earlier);
    event.block(*stream);
  });
}

// Keeps the tensor's memory from other uses, once it is freed, until the thread's current stream has passed this point.
char* ddp_cuda_record_stream(const at::Tensor* tensor) {
  return guarded([&] {
    const auto stream = cuda().getStream(tensor->device());
    cuda().recordDataPtrOnStream(tensor->storage().data_ptr(), stream);
  });
}

}  // extern "C"
