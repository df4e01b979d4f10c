// What the ranks of a communicator send each other, and where it arrives.
//
// Every rank posts one message to each rank that takes part in an operation, also where it has no data for it. An
// operation ends at a rank when all the others' messages have arrived, agree with its own call, and stand.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "types.h"

namespace sim_nccl {

using Data = std::shared_ptr<const std::vector<char>>;

// What all ranks of an operation must agree on. The root of a send is the receiver, and the other way round.
struct Agreement {
  Operation operation;
  DataType type;
  Reduction reduction;
  int root;
  uint64_t count;
};

// The place of an operation among those of its channel: collectives, or messages of one rank to another.
enum class Channel : uint32_t { Collective, Send, Recv };
struct Place {
  Channel channel;
  uint64_t number;
};

struct Message {
  // `Withdraw`: the sender has aborted before the operation ended. `Finalize`: the sender has called ncclCommFinalize.
  enum class Kind : uint32_t { Post, Withdraw, Finalize } kind;
  Place place;
  Agreement call;
  uint64_t bytes;  // of the data that follows
};

// One per rank of a communicator in this process.
class Inbox {
 public:
  explicit Inbox(int size) : is_final(size, false), is_lost(size, false) {}

  struct Arrived {
    Agreement call;
    Data data;
    bool is_withdrawn = false;
  };

  // `data` may be null.
  void deliver(int from, const Message& message, Data data);
  // The connection to a rank has ended.
  void lose(int rank);
  // Wakes all waits.
  void wake();
  // Calls `is_done` with the lock held, now and after each change, until it returns true.
  template <typename F>
  void wait_until(F is_done) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, is_done);
  }

  // For `wait_until`: with the lock held.
  Arrived* find(int from, Place place);
  void take(int from, Place place) { arrived.erase({from, place.channel, place.number}); }
  bool has_lost(int rank) const { return is_lost[rank]; }
  // Whether all other ranks have called ncclCommFinalize.
  bool all_final(int rank);

 private:
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::tuple<int, Channel, uint64_t>, Arrived> arrived;
  std::vector<bool> is_final, is_lost;
};

}  // namespace sim_nccl
