// What a launch does on the thread of its stream.

#include <cstring>

#include "communicator.h"

namespace sim_nccl {
namespace {

// A call that has begun.
struct Begun {
  Call call;
  Place own, theirs;       // where its messages go, and where those of its peers come from
  std::vector<int> peers;
  Data input;              // as it was at the beginning
};

uint64_t output_bytes(const Call& call, int rank, int size) {
  switch (call.agreed.operation) {
    case Reduce: return rank == call.agreed.root ? call.bytes() : 0;
    case AllGather: return call.bytes() * static_cast<uint64_t>(size);
    case Send: return 0;
    default: return call.bytes();
  }
}

uint64_t input_bytes(const Call& call, int rank, int size) {
  switch (call.agreed.operation) {
    case Broadcast: return rank == call.agreed.root ? call.bytes() : 0;
    case ReduceScatter: return call.bytes() * static_cast<uint64_t>(size);
    case Recv: return 0;
    default: return call.bytes();
  }
}

// What a rank sends to `peer`, or null.
Data part_for(const Begun& begun, int peer) {
  const auto& call = begun.call;
  if (begun.input == nullptr || (call.agreed.operation == Reduce && peer != call.agreed.root)) return nullptr;
  if (call.agreed.operation != ReduceScatter) return begun.input;
  const auto* part = begun.input->data() + call.bytes() * static_cast<uint64_t>(peer);
  return std::make_shared<std::vector<char>>(part, part + call.bytes());
}

Begun begin(Comm comm, const Call& call) {
  Begun begun{call, {}, {}, {}, nullptr};
  if (call.is_collective()) {
    begun.own = begun.theirs = {Channel::Collective, ++comm->collectives};
    for (int peer = 0; peer < comm->size; peer++) {
      if (peer != comm->rank) begun.peers.push_back(peer);
    }
  } else {
    const bool sends = call.agreed.operation == Send;
    const auto channel = sends ? Channel::Send : Channel::Recv;
    const int peer = call.agreed.root;
    begun.own = {channel, ++comm->messages[{channel, peer}]};
    begun.theirs = {sends ? Channel::Recv : Channel::Send, begun.own.number};
    begun.peers = {peer};
  }
  if (const auto size = input_bytes(call, comm->rank, comm->size)) {
    const auto* input = static_cast<const char*>(call.input);
    begun.input = std::make_shared<std::vector<char>>(input, input + size);
  }
  return begun;
}

// A rank may send itself messages, within a group.
void post(Comm comm, int peer, const Message& message, Data data) {
  if (peer == comm->rank) {
    comm->inbox->deliver(peer, message, std::move(data));
  } else {
    comm->group.peers[peer]->post(message, std::move(data));
  }
}

void post_all(Comm comm, const Begun& begun) {
  for (int peer : begun.peers) {
    auto data = part_for(begun, peer);
    const uint64_t bytes = data == nullptr ? 0 : data->size();
    post(comm, peer, {Message::Kind::Post, begun.own, begun.call.agreed, bytes}, std::move(data));
  }
}

bool agrees(const Begun& begun, const Agreement& other) {
  const auto& own = begun.call.agreed;
  if (!begun.call.is_collective()) {
    return own.count * element_sizes[own.type] == other.count * element_sizes[other.type];
  }
  return own.operation == other.operation && own.count == other.count && own.type == other.type &&
         own.reduction == other.reduction && own.root == other.root;
}

enum class State { Done, Waits, PeerLost };

// With the inbox's lock held. `peer` is the rank that the state is due to.
State state_of(Comm comm, const Begun& begun, int* peer) {
  for (int other : begun.peers) {
    *peer = other;
    auto* arrived = comm->inbox->find(other, begun.theirs);
    if (arrived != nullptr && agrees(begun, arrived->call) && !arrived->is_withdrawn) continue;
    // Nothing more comes from another host; on the same host nobody notices.
    const bool is_lost = comm->inbox->has_lost(other) && comm->group.peers[other]->is_on_other_host();
    return is_lost ? State::PeerLost : State::Waits;
  }
  return State::Done;
}

// Writes the result. With the inbox's lock held, and all messages there.
void finish(Comm comm, const Begun& begun) {
  const auto& call = begun.call;
  const auto bytes = call.bytes();
  auto* output = static_cast<char*>(call.output);
  auto data_of = [&](int rank) -> const char* {
    if (rank == comm->rank && call.is_collective()) {
      if (begun.input == nullptr) return nullptr;
      const bool is_slice = call.agreed.operation == ReduceScatter;
      return begun.input->data() + (is_slice ? bytes * static_cast<uint64_t>(rank) : 0);
    }
    const auto& data = comm->inbox->find(rank, begun.theirs)->data;
    return data == nullptr ? nullptr : data->data();
  };
  if (bytes > 0) {
    switch (call.agreed.operation) {
      case Reduce:
        if (comm->rank != call.agreed.root) break;
        [[fallthrough]];
      case AllReduce:
      case ReduceScatter: {
        std::vector<const char*> ranks;
        for (int rank = 0; rank < comm->size; rank++) ranks.push_back(data_of(rank));
        reduce(call.agreed.type, call.agreed.reduction, ranks, call.agreed.count, output);
        break;
      }
      case Broadcast:
      case Recv: memcpy(output, data_of(call.agreed.root), bytes); break;
      case AllGather:
        for (int rank = 0; rank < comm->size; rank++, output += bytes) memcpy(output, data_of(rank), bytes);
        break;
      case Send: break;
    }
  }
  sim::spoil(operation_names[call.agreed.operation], comm->device, call.output,
             output_bytes(call, comm->rank, comm->size));
  for (int peer : begun.peers) comm->inbox->take(peer, begun.theirs);
}

}  // namespace

void run(Comm comm, const std::vector<Call>& calls, uint64_t number, const std::string& fault) {
  if (comm->is_aborted) return;
  if (fault == "remote") fail(comm, RemoteError, "socketProgress: Connection closed by remote peer");
  if (fault == "system") fail(comm, SystemError, "Call to recv failed : No route to host");
  std::vector<Begun> all;
  for (auto& call : calls) all.push_back(begin(comm, call));
  // Nobody may read an output before the end.
  for (auto& call : calls) sim::poison(call.output, output_bytes(call, comm->rank, comm->size));
  // A communicator that has failed sends nothing.
  for (auto& begun : all) {
    if (comm->error == Success) post_all(comm, begun);
  }

  bool is_done = false;
  comm->inbox->wait_until([&] {
    if (comm->is_aborted) return true;
    is_done = true;
    for (auto& begun : all) {
      int peer = 0;
      const auto state = state_of(comm, begun, &peer);
      if (state == State::PeerLost) fail(comm, RemoteError, "connection closed by rank " + std::to_string(peer));
      is_done &= state == State::Done;
    }
    if (comm->error != Success) is_done = false;
    return is_done;
  });
  if (is_done) {
    sim::sleep_us(sim::random_delay_us(0x4e43434c00000000 + static_cast<uint64_t>(comm->rank), number));
    comm->inbox->wait_until([&] {
      for (auto& begun : all) finish(comm, begun);
      return true;
    });
    return;
  }
  for (auto& begun : all) {
    for (int peer : begun.peers) post(comm, peer, {Message::Kind::Withdraw, begun.own, {}, 0}, nullptr);
  }
}

}  // namespace sim_nccl
