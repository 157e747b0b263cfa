// Messages from one rank to another and back over a wire, with the interface of a Pipe.
//
// A message is sent whole, at once, and never waits for a receive: its receiver says now and then how many
// bytes it has taken, and a sender is at most kWindow bytes ahead of that. Both sides begin on their own:
// what comes before this rank has first looked is kept by the wire.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

#include "../shm/pipe.hpp"
#include "../wire/wire.hpp"

namespace ringcomm {

class WirePipe {
 public:
  static constexpr std::size_t kWindow = std::size_t{256} << 10;

  // longest: bytes of a message, the same on both sides; at most kWindow / 4. peer: as the wire counts.
  WirePipe(std::shared_ptr<Wire> wire, int peer, int tag, std::size_t longest);
  WirePipe(const WirePipe&) = delete;
  WirePipe& operator=(const WirePipe&) = delete;

  // As those of Pipe; each throws WireFault.
  bool put(const Chunk* chunks, std::size_t n);
  Pipe::Message peek();
  void pop();

  // Waits for what is on its way to the other, at most for limit_ns, and takes nothing more. What is left
  // then stays alive for ever. Nothing is called after it.
  void close(std::int64_t limit_ns) noexcept;

 private:
  struct Head { std::uint64_t n_taken; };  // bytes that the sender of this message has taken since the beginning

  struct Letter {
    std::unique_ptr<std::byte[]> bytes;
    std::unique_ptr<Message> message;
  };

  std::size_t room() const { return sizeof(Head) + longest_; }
  void open();
  void send(std::unique_ptr<std::byte[]> bytes, std::size_t nbytes);
  void forget_sent();
  void say_what_is_taken();

  const std::shared_ptr<Wire> wire_;
  const int peer_, tag_;
  const std::size_t longest_;
  std::array<Letter, 2> receives_;  // while one is looked at, the next one may come
  std::size_t next_ = 0;            // of them
  std::size_t n_held_ = 0;          // bytes of what peek() has returned
  bool is_open_ = false;
  std::deque<Letter> sends_;        // that the wire may still read
  std::uint64_t n_sent_ = 0, n_acknowledged_ = 0;  // bytes since the beginning
  std::uint64_t n_taken_ = 0, n_told_ = 0;
};

}  // namespace ringcomm
