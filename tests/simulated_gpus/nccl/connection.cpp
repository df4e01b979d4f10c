// A TCP connection to a rank in another process. One thread sends, as NCCL's proxy does, and one receives.

#include "connection.h"

#include <sys/socket.h>

namespace sim_nccl {
namespace {

using Clock = std::chrono::steady_clock;

// What the connection's threads share with its owner.
struct Shared {
  File file;
  int peer;
  std::shared_ptr<Inbox> inbox;
  std::mutex mutex;
  std::condition_variable changed;
  struct Entry {
    Message message;
    Data data;
    Clock::time_point not_before;
  };
  std::deque<Entry> queue;
  bool is_sending = false;
  bool holds_nothing = false;  // `not_before` no longer counts
  bool is_ended = false;       // no more entries come
  Stop stop{false};
};

void send_entries(const std::shared_ptr<Shared>& shared) {
  for (;;) {
    Shared::Entry entry;
    {
      std::unique_lock<std::mutex> lock(shared->mutex);
      shared->is_sending = false;
      shared->changed.notify_all();
      for (;;) {
        if (shared->stop || (shared->queue.empty() && shared->is_ended)) {
          shutdown(shared->file, SHUT_WR);
          return;
        }
        if (shared->queue.empty()) {
          shared->changed.wait(lock);
        } else if (!shared->holds_nothing && Clock::now() < shared->queue.front().not_before) {
          shared->changed.wait_until(lock, shared->queue.front().not_before);
        } else {
          break;
        }
      }
      entry = std::move(shared->queue.front());
      shared->queue.pop_front();
      shared->is_sending = true;
    }
    const bool is_sent = send_all(shared->file, &entry.message, sizeof entry.message, shared->stop) &&
                         (entry.data == nullptr ||
                          send_all(shared->file, entry.data->data(), entry.data->size(), shared->stop));
    if (!is_sent) shared->stop = true;
  }
}

// Until the other side ends, so that its last words are read.
void receive_messages(const std::shared_ptr<Shared>& shared) {
  const Stop never{false};
  Message message;
  while (receive_all(shared->file, &message, sizeof message, never)) {
    auto data = std::make_shared<std::vector<char>>(message.bytes);
    if (!receive_all(shared->file, data->data(), data->size(), never)) break;
    shared->inbox->deliver(shared->peer, message, message.bytes == 0 ? nullptr : std::move(data));
  }
  shared->inbox->lose(shared->peer);
}

class RemotePeer final : public Peer {
 public:
  RemotePeer(std::shared_ptr<Shared> shared, bool is_other_host, bool is_higher)
      : shared(std::move(shared)), is_other_host(is_other_host), is_higher(is_higher) {}

  void post(const Message& message, Data data) override {
    {
      std::lock_guard<std::mutex> lock(shared->mutex);
      if (shared->stop || shared->is_ended) return;
      shared->queue.push_back({message, std::move(data), Clock::now() + hold(message)});
    }
    shared->changed.notify_all();
  }

  bool is_flushed() override {
    std::lock_guard<std::mutex> lock(shared->mutex);
    return shared->stop || (shared->queue.empty() && !shared->is_sending);
  }

  void flush() override {
    {
      std::lock_guard<std::mutex> lock(shared->mutex);
      shared->holds_nothing = true;
    }
    shared->changed.notify_all();
  }

  void end(bool is_abort) override {
    std::unique_lock<std::mutex> lock(shared->mutex);
    if (is_abort && is_other_host && cuts()) {
      shared->queue.clear();
    } else {
      shared->holds_nothing = true;
    }
    shared->is_ended = true;
    shared->changed.notify_all();
    // What a peer does not take soon, it never takes.
    auto is_empty = [&] { return shared->stop || (shared->queue.empty() && !shared->is_sending); };
    if (!shared->changed.wait_for(lock, std::chrono::seconds(1), is_empty)) shared->stop = true;
    shared->changed.notify_all();
  }

  bool is_on_other_host() const override { return is_other_host; }

 private:
  std::shared_ptr<Shared> shared;
  bool is_other_host, is_higher;

  static bool cuts() {
    static const bool is_on = sim::setting("SIM_NCCL_ABORT_CUTS", 0) != 0;
    return is_on;
  }
  // Returns how long the proxy keeps a message that its rank counts as sent. The later ranks of a ring get theirs last.
  std::chrono::microseconds hold(const Message& message) const {
    static const long hold_us = sim::setting("SIM_NCCL_HOLD_US", 20000);
    const auto channel = message.place.channel;
    const bool is_last = channel == Channel::Collective ? is_higher : channel == Channel::Send;
    return std::chrono::microseconds(cuts() && is_other_host && is_last ? hold_us : 0);
  }
};

}  // namespace

std::unique_ptr<Peer> connect_peer(File file, int rank, int peer, bool is_on_other_host, std::shared_ptr<Inbox> inbox) {
  auto shared = std::make_shared<Shared>();
  shared->file = std::move(file);
  shared->peer = peer;
  shared->inbox = std::move(inbox);
  std::thread(send_entries, shared).detach();
  std::thread(receive_messages, shared).detach();
  return std::make_unique<RemotePeer>(std::move(shared), is_on_other_host, peer > rank);
}

}  // namespace sim_nccl
