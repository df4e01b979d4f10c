// torch.distributed's TCPStore and ProcessGroupGloo behind a C ABI. Each function is declared in ffi/c10d.rs.
//
// Both are inside libtorch_cpu. The rules of shim.cpp apply. Functions that block are documented as such: Rust calls
// them on threads that no other thread has to join.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "guarded.h"

namespace {

using Millis = std::chrono::milliseconds;
using Store = c10::intrusive_ptr<c10d::TCPStore>;
using c10d::ProcessGroupGloo;

// Copies the bytes before it returns.
using Take = void (*)(void* context, const uint8_t* bytes, size_t len);

// Called once when an operation has ended, maybe on another thread. `error` is null, or the reason of the failure.
using Done = void (*)(void* context, const char* error);

std::vector<uint8_t> bytes_of(const uint8_t* bytes, size_t len) {
  return len == 0 ? std::vector<uint8_t>() : std::vector<uint8_t>(bytes, bytes + len);
}

std::vector<std::string> strings_of(const char* const* strings, size_t len) {
  return std::vector<std::string>(strings, strings + len);
}

std::vector<at::Tensor> tensors_of(at::Tensor* const* tensors, size_t len) {
  std::vector<at::Tensor> list;
  for (size_t i = 0; i < len; i++) list.push_back(*tensors[i]);
  return list;
}

// Turns off libtorch's logging, unless PyTorch's variable TORCH_CPP_LOG_LEVEL is set. The store and Gloo log every
// failure with a stack trace, but also return it as an error, which Rust reports.
void be_quiet() {
  static const bool once = [] {
    if (getenv("TORCH_CPP_LOG_LEVEL") == nullptr) FLAGS_caffe2_log_level = 3;  // FATAL
    return true;
  }();
  static_cast<void>(once);
}

// The collectives and messages of src/operation.rs, with their numbers. c10d.rs checks them.
enum class Operation : uint8_t {
  AllReduce = 4,
  Reduce,
  Broadcast,
  AllGather,
  Gather,
  Scatter,
  ReduceScatter,
  AllToAll,
  Send,
  Recv,
  Barrier = 15,
};

}  // namespace

extern "C" {

// --- TCPStore -----------------------------------------------------------------------------------

// Serves a store at `host`, an address, on the bound socket `listen_fd`, which it always takes over. If `listen_fd` is
// -1, only connects to the server there. Blocks until the client is connected.
char* ddp_store_new(const char* host, uint16_t port, int listen_fd, int64_t timeout_ms, Store** store) {
  return guarded([&] {
    be_quiet();
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = listen_fd >= 0;
    if (listen_fd >= 0) options.masterListenFd = listen_fd;
    options.waitWorkers = false;
    options.timeout = Millis(timeout_ms);
    *store = new Store(c10::make_intrusive<c10d::TCPStore>(host, options));
  });
}

void ddp_store_free(Store* store) { delete store; }

char* ddp_store_set(Store* store, const char* key, const uint8_t* bytes, size_t len) {
  return guarded([&] { (*store)->set(key, bytes_of(bytes, len)); });
}

// Blocks until the server responds, like all functions below.
char* ddp_store_get(Store* store, const char* key, Take take, void* context) {
  return guarded([&] {
    auto value = (*store)->get(key);
    take(context, value.data(), value.size());
  });
}

// Sets `there` to whether all keys were set in time, or whether they are set now if there is no time.
char* ddp_store_wait(Store* store, const char* const* keys, size_t len, int64_t timeout_ms, bool* there) {
  return guarded([&] {
    auto all = strings_of(keys, len);
    if (timeout_ms == 0) {
      *there = (*store)->check(all);
      return;
    }
    try {
      (*store)->wait(all, Millis(timeout_ms));
      *there = true;
    } catch (const c10::DistStoreError&) {  // thrown on timeout
      *there = false;
    }
  });
}

char* ddp_store_add(Store* store, const char* key, int64_t amount, int64_t* sum) {
  return guarded([&] { *sum = (*store)->add(key, amount); });
}

// Sets a key that is not set. Takes its value afterwards.
char* ddp_store_set_new(Store* store, const char* key, const uint8_t* bytes, size_t len, Take take, void* context) {
  return guarded([&] {
    auto value = (*store)->compareSet(key, {}, bytes_of(bytes, len));
    take(context, value.data(), value.size());
  });
}

// --- ProcessGroupGloo ---------------------------------------------------------------------------

// Connects to all other ranks, with a rendezvous under `prefix`. Uses the named network interfaces, or else the
// interface with `address`. Blocks until all ranks are connected, at most for the timeout.
char* ddp_gloo_new(Store* store, const char* prefix, int rank, int size, int64_t timeout_ms,
                   const char* const* interfaces, size_t interfaces_len, const char* address,
                   ProcessGroupGloo** group) {
  return guarded([&] {
    auto options = ProcessGroupGloo::Options::create(Millis(timeout_ms));
    for (const auto& name : strings_of(interfaces, interfaces_len)) {
      options->devices.push_back(ProcessGroupGloo::createDeviceForInterface(name));
    }
    if (interfaces_len == 0) options->devices.push_back(ProcessGroupGloo::createDeviceForHostname(address));
    auto under_prefix = c10::make_intrusive<c10d::PrefixStore>(prefix, *store);
    *group = c10::make_intrusive<ProcessGroupGloo>(under_prefix, rank, size, options).release();
  });
}

// Joins the group's threads: blocks until its operations have ended.
void ddp_gloo_free(ProcessGroupGloo* group) {
  c10::intrusive_ptr<ProcessGroupGloo>::reclaim(group);
}

// One call of a collective, or of send or recv.
struct Call {
  Operation operation;
  c10d::ReduceOp::RedOpType reduce;
  int peer;  // the root, the destination or the source
  int tag;
  at::Tensor* const* inputs;
  size_t inputs_len;
  at::Tensor* const* outputs;
  size_t outputs_len;
  const int64_t* input_splits;  // all_to_all: rows to and from each rank
  const int64_t* output_splits;
  size_t splits_len;
};

// Guards libtorch's flight recorder. Each process has one, which records every start, and adds to a map of all groups
// without a lock. Several ranks of one process must not do that at once.
static std::mutex recording;

static c10::intrusive_ptr<c10d::Work> start(ProcessGroupGloo& group, const Call& call) {
  std::lock_guard<std::mutex> lock(recording);
  auto inputs = tensors_of(call.inputs, call.inputs_len);
  auto outputs = tensors_of(call.outputs, call.outputs_len);
  std::vector<std::vector<at::Tensor>> lists;
  switch (call.operation) {
    case Operation::AllReduce: {
      c10d::AllreduceOptions options;
      options.reduceOp = call.reduce;
      return group.allreduce(outputs, options);
    }
    case Operation::Reduce: {
      c10d::ReduceOptions options;
      options.reduceOp = call.reduce;
      options.rootRank = call.peer;
      return group.reduce(outputs, options);
    }
    case Operation::Broadcast: {
      c10d::BroadcastOptions options;
      options.rootRank = call.peer;
      return group.broadcast(outputs, options);
    }
    case Operation::AllGather:
      lists.push_back(std::move(outputs));
      return group.allgather(lists, inputs);
    case Operation::Gather: {
      c10d::GatherOptions options;
      options.rootRank = call.peer;
      if (group.getRank() == call.peer) lists.push_back(std::move(outputs));
      return group.gather(lists, inputs, options);
    }
    case Operation::Scatter: {
      c10d::ScatterOptions options;
      options.rootRank = call.peer;
      if (group.getRank() == call.peer) lists.push_back(std::move(inputs));
      return group.scatter(outputs, lists, options);
    }
    case Operation::ReduceScatter: {
      c10d::ReduceScatterOptions options;
      options.reduceOp = call.reduce;
      return group._reduce_scatter_base(outputs.at(0), inputs.at(0), options);
    }
    case Operation::AllToAll: {
      std::vector<int64_t> from(call.output_splits, call.output_splits + call.splits_len);
      std::vector<int64_t> to(call.input_splits, call.input_splits + call.splits_len);
      return group.alltoall_base(outputs.at(0), inputs.at(0), from, to);
    }
    case Operation::Barrier:
      return group.barrier();
    case Operation::Send:
      return group.send(inputs, call.peer, call.tag);
    case Operation::Recv:
      return group.recv(outputs, call.peer, call.tag);
  }
  throw std::logic_error("no such operation");
}

// Starts an operation. Unless this fails, `done` is called once when the operation has ended, even if the group is
// freed. Until then libtorch has handles of its own to the tensors. Only one thread may call a group at a time.
char* ddp_gloo_start(ProcessGroupGloo* group, const Call* call, Done done, void* context) {
  return guarded([&] {
    c10::AutoGradMode no_grad(false);
    auto work = start(*group, *call);
    if (call->operation == Operation::Send || call->operation == Operation::Recv ||
        call->operation == Operation::ReduceScatter) {
      // These operations have no future, and no thread of libtorch waits for them. (reduce_scatter is an all_reduce
      // whose wait() copies a part of the result.) Without a timeout, they take that with which the group has connected.
      auto timeout = group->getOptions()->timeout;
      auto wait = [work = std::move(work), done, context, timeout]() mutable {
        char* message = guarded([&] { work->wait(timeout); });
        work.reset();
        done(context, message);
        free(message);
      };
      try {
        std::thread(std::move(wait)).detach();
      } catch (const std::system_error& error) {
        throw std::runtime_error(std::string("no thread can be started to wait for it: ") + error.what());
      }
      return;
    }
    work->getFuture()->addCallback([done, context](c10::ivalue::Future& future) {
      if (!future.hasError()) return done(context, nullptr);
      auto message = future.tryRetrieveErrorMessage();
      done(context, message.c_str());
    });
  });
}

// Makes operations that start from now on fail after the timeout.
char* ddp_gloo_set_timeout(ProcessGroupGloo* group, int64_t timeout_ms) {
  return guarded([&] { group->setTimeout(Millis(timeout_ms)); });
}

// Makes all operations of this group fail at once, and those of the ranks that wait for this one.
//
// ProcessGroupGloo has no abort. But when one of its operations times out, it closes all connections of the group,
// which fails every operation that waits on them. So this starts an operation that times out.
char* ddp_gloo_abort(ProcessGroupGloo* group) {
  return guarded([&] {
    const int tag = 0x7ffffffe;  // no other operation uses it
    for (int peer = 0; peer < group->getSize(); peer++) {
      if (peer == group->getRank()) continue;
      std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
      try {
        auto waiting = [&] {
          std::lock_guard<std::mutex> lock(recording);
          return group->recv(nothing, peer, tag);
        }();
        waiting->wait(Millis(1));
      } catch (const std::exception&) {
        // Either the intended timeout, or a connection that was already broken. Others may still be open.
      }
    }
  });
}

}  // extern "C"
