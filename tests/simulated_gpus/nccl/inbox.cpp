// Where messages of other ranks arrive.

#include "inbox.h"

namespace sim_nccl {

void Inbox::deliver(int from, const Message& message, Data data) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    switch (message.kind) {
      case Message::Kind::Post:
        arrived[{from, message.place.channel, message.place.number}] = {message.call, std::move(data)};
        break;
      case Message::Kind::Withdraw:
        if (auto* posted = find(from, message.place)) posted->is_withdrawn = true;
        break;
      case Message::Kind::Finalize: is_final[from] = true; break;
    }
  }
  changed.notify_all();
}

void Inbox::lose(int rank) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    is_lost[rank] = true;
  }
  changed.notify_all();
}

void Inbox::wake() {
  // Not between a waiter's look and its sleep.
  { std::lock_guard<std::mutex> lock(mutex); }
  changed.notify_all();
}

Inbox::Arrived* Inbox::find(int from, Place place) {
  auto found = arrived.find({from, place.channel, place.number});
  return found == arrived.end() ? nullptr : &found->second;
}

bool Inbox::all_final(int rank) {
  std::lock_guard<std::mutex> lock(mutex);
  for (size_t other = 0; other < is_final.size(); other++) {
    if (static_cast<int>(other) != rank && !is_final[other]) return false;
  }
  return true;
}

}  // namespace sim_nccl
