// How the ranks of a communicator find each other: over TCP, at the address in the unique id, as in NCCL.
#pragma once

#include "connection.h"

namespace sim_nccl {

// Makes an id, and starts the root that its ranks check in with. Returns a failure's result.
Result make_unique_id(UniqueId* id);

// What a rank checks in with.
struct Member {
  uint64_t id[2];
  int32_t rank, size, device;  // the device's number on its host
  uint64_t process[2];
  char host[64];
  Address listener;
};

struct Group {
  std::vector<Member> members;
  std::vector<std::unique_ptr<Peer>> peers;  // null at the own place
};

// Registers the inbox of a rank of this process, before it joins. It stays: other ranks may post to one that has ended.
void register_inbox(const UniqueId& id, int rank, std::shared_ptr<Inbox> inbox);
// Checks in, waits for all ranks, and connects to them. Ends early when stopped.
Result join(const UniqueId& id, int rank, int size, int device, const std::shared_ptr<Inbox>& inbox, const Stop& stop,
            Group* group, std::string* reason);

}  // namespace sim_nccl
