// The way from one rank to another: a call within a process, TCP between processes.
#pragma once

#include <chrono>
#include <deque>
#include <thread>

#include "inbox.h"
#include "socket.h"

namespace sim_nccl {

class Peer {
 public:
  virtual ~Peer() = default;
  virtual void post(const Message& message, Data data) = 0;
  // Whether all that was posted has been handed to the network.
  virtual bool is_flushed() { return true; }
  // Delivers what SIM_NCCL_ABORT_CUTS holds back.
  virtual void flush() {}
  // Ends the connection. `is_abort`: as ncclCommAbort, which drops what the network has not taken yet.
  virtual void end(bool is_abort) { static_cast<void>(is_abort); }
  virtual bool is_on_other_host() const { return false; }
};

class LocalPeer final : public Peer {
 public:
  LocalPeer(int from, std::shared_ptr<Inbox> to) : from(from), to(std::move(to)) {}
  void post(const Message& message, Data data) override { to->deliver(from, message, std::move(data)); }

 private:
  int from;
  std::shared_ptr<Inbox> to;
};

// Starts threads that own the connection, also after `end`.
std::unique_ptr<Peer> connect_peer(File file, int rank, int peer, bool is_on_other_host, std::shared_ptr<Inbox> inbox);

}  // namespace sim_nccl
