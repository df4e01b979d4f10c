// The state of a communicator: how it joins, launches and ends.

#include "communicator.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include <sys/socket.h>
#include <unistd.h>

namespace sim_nccl {
namespace {

// What a launch does on the thread of its stream. Returns when all its calls have ended, or at the abort.
void run(const Launch& launch) {
  const auto comm = launch.comm;
  if (comm->is_aborted) return;
  if (launch.fault == "remote") fail(comm, RemoteError, "socketProgress: Connection closed by remote peer");
  if (launch.fault == "system") fail(comm, SystemError, "Call to recv failed : No route to host");
  Bytes message;
  for (auto& call : launch.calls) {
    put(message, call.agreed);
    const auto* input = static_cast<const char*>(call.input);
    message.insert(message.end(), input, input + call.agreed.input_bytes(comm->rank, comm->size));
  }
  // Nobody may read an output before the end.
  for (auto& call : launch.calls) sim::poison(call.output, call.agreed.output_bytes(comm->rank, comm->size));
  Bytes outputs;
  // A communicator that has failed sends nothing.
  if (comm->error != Success || !send_message(comm->hub, message) || !receive_message(comm->hub, &outputs)) {
    comm->is_aborted.wait(false);
    return;
  }
  sim::sleep_us(sim::random_delay_us(0x4e43434c00000000 + static_cast<uint64_t>(comm->rank),
                                     static_cast<uint64_t>(launch.number)));
  const auto* from = outputs.data();
  for (auto& call : launch.calls) {
    const auto bytes = call.agreed.output_bytes(comm->rank, comm->size);
    if (bytes > 0) memcpy(call.output, from, bytes);
    sim::spoil(operation_names[call.agreed.operation], comm->device, call.output, bytes);
    from += bytes;
  }
}

void launch_pending(Comm comm) {
  auto launch = std::move(comm->pending);
  comm->pending.calls.clear();
  const long before = comm->launched++;
  sim::launch(launch.stream, operation_names[launch.calls[0].agreed.operation], [launch, before] {
    auto& ended = launch.comm->ended;
    // One at a time talks to the hub, in the order of the calls, whichever streams they are on.
    for (long seen = ended; seen < before; seen = ended) ended.wait(seen);
    run(launch);
    ended++;
    ended.notify_all();
  });
  if (comm->size > 1) sim::mark_collective(launch.stream);
}

enum class Answer { None, Came, Lost };

// Takes an answer of the hub's if it has come.
Answer hear(Comm comm, Bytes* message) {
  char byte;
  const auto found = recv(comm->hub, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (found < 0) return Answer::None;
  return found > 0 && receive_message(comm->hub, message) ? Answer::Came : Answer::Lost;
}

void hear_whether_joined(Comm comm) {
  Bytes refusal;
  switch (comm->hub < 0 ? Answer::None : hear(comm, &refusal)) {
    case Answer::None: break;
    case Answer::Lost: fail(comm, RemoteError, "Bootstrap : connection closed by the root"); break;
    case Answer::Came:
      comm->is_joined = refusal.empty();
      if (!refusal.empty()) fail(comm, InvalidUsage, std::string(refusal.begin(), refusal.end()));
  }
}

// It is final when all ranks are. The process of the hub may end then, before all have read that.
void hear_whether_final(Comm comm) {
  if (comm->ended < comm->launched || comm->is_final) return;
  if (!comm->has_told_hub) send_message(comm->hub, {});
  comm->has_told_hub = true;
  Bytes message;
  comm->is_final = hear(comm, &message) != Answer::None;
}

}  // namespace

void fail(Comm comm, Result result, const std::string& reason) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (comm->error != Success) return;
  failed(result, reason);
  comm->error_text = reason;
  comm->error = result;
}

void join(Comm comm, const UniqueId& id) {
  comm->hub = connect_to_hub(id);
  if (comm->hub < 0) return fail(comm, RemoteError, "Bootstrap : connection to the root refused");
  Hello hello{comm->rank, comm->size, sim::physical_device(comm->device), {}};
  snprintf(hello.host, sizeof hello.host, "%s", sim::text_setting("NCCL_HOSTID").c_str());
  Bytes message;
  put(message, hello);
  send_message(comm->hub, message);
}

Result begin(const Launch& launch) {
  const auto comm = launch.comm;
  comm->polls_left = 2;
  comm->pending = launch;
  comm->pending.number = ++comm->launches;
  comm->pending.fault = fault_at(comm->rank, comm->launches);
  if (comm->pending.fault != "launch") return InProgress;
  fail(comm, UnhandledCudaError, "Cuda failure 'unspecified launch failure'");
  return UnhandledCudaError;
}

Result poll(Comm comm) {
  if (!comm->is_joined) hear_whether_joined(comm);
  if (comm->is_finalized) hear_whether_final(comm);
  if (comm->error != Success) return static_cast<Result>(comm->error.load());
  if (!comm->is_joined || (comm->is_finalized && !comm->is_final)) return InProgress;
  if (comm->polls_left > 0) {
    if (--comm->polls_left == 0 && !comm->pending.calls.empty()) launch_pending(comm);
    return InProgress;
  }
  return Success;
}

void end(Comm comm) {
  comm->is_aborted = true;
  comm->is_aborted.notify_all();
  if (comm->hub >= 0) shutdown(comm->hub, SHUT_RDWR);
  for (long seen = comm->ended; seen < comm->launched; seen = comm->ended) comm->ended.wait(seen);
  if (comm->hub >= 0) close(comm->hub);
  comm->state = 0;
}

std::string fault_at(int rank, long number) {
  static const auto text = sim::text_setting("SIM_NCCL_FAULT");
  static std::atomic<bool> is_over{false};
  if (text.empty()) return {};
  char kind[16] = "";
  int of_rank = 0;
  long call = 0;
  if (sscanf(text.c_str(), "%15[a-z]:rank=%d,call=%ld", kind, &of_rank, &call) != 3) abort();
  return rank == of_rank && number == call && !is_over.exchange(true) ? kind : "";
}

}  // namespace sim_nccl
