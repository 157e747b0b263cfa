// Clients of parameter servers, as threads, for the programs beside this.
#pragma once
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../loop/loop.hpp"
#include "../ps/pipe_endpoint.hpp"

namespace ringcomm::ps {

constexpr std::size_t kArena = 64u << 20, kPipe = 64u << 10, kInlineMax = 15u << 10, kMeta = 900;
// Of the blocks of two servers. A push of 24,000 bytes travels in shared memory.
constexpr std::array<std::size_t, 2> kCounts = {6000, 1000};
constexpr std::uint32_t kTable = 3, kEpoch = 1;
constexpr Kind kQuestion = static_cast<Kind>(77);  // what the endpoint does not understand

[[noreturn]] inline void fail(const char* what, std::uint32_t rank) {
  std::fprintf(stderr, "rank %u: %s\n", rank, what);
  std::_Exit(1);
}

inline Pipe pipe_in(NodeMemory& memory) {
  const Pipe pipe(memory.arena() + memory.allocator().take(kPipe), kPipe);
  pipe.clear();
  return pipe;
}

inline std::byte* room_for_block(NodeMemory& memory, std::size_t count) {
  return memory.arena() + memory.allocator().take(block_nbytes(count * sizeof(float)));
}

// A block to which pushes add; of zeros at first.
inline std::shared_ptr<BlockUpdater> new_block(std::byte* room, std::size_t count) {
  const Block block(room, count * sizeof(float), 0);
  auto updater = std::make_shared<BlockUpdater>(block, count, DType::float32);
  updater->attach(static_cast<int>(Updater::add), 0, {}, 0, 1);
  updater->may_ack = true;
  return updater;
}

inline void require_values(BlockUpdater& updater, std::uint64_t n_pushes) {
  const Block& block = updater.block();
  const auto* const values = reinterpret_cast<const float*>(block.values());
  for (std::size_t i = 0; i < updater.count(); ++i)
    if (values[i] != static_cast<float>(n_pushes)) fail("a push was lost, or counted twice", 0);
}

inline std::string push_meta(std::size_t n) {
  std::string meta(28, '\0');
  const double weight = 1;
  const std::uint64_t start = 0, count = n;
  std::memcpy(&meta[0], &weight, 8);
  std::memcpy(&meta[8], &start, 8);
  std::memcpy(&meta[16], &count, 8);
  meta[26] = 7;
  return meta + "float32";
}

// Two threads may work(). The servers are the ranks from 0 on: each has the block of the partition
// with its number, of kCounts elements.
class Client {
 public:
  Client(std::uint32_t rank, std::shared_ptr<NodeMemory> memory, std::vector<Mate> servers)
      : rank_(rank),
        memory_(std::move(memory)),
        loop_(&memory_->bell(), kCrowded, memory_),
        n_servers_(servers.size()) {
    endpoint_ = std::make_shared<PipeEndpoint>(rank, memory_, std::move(servers), false, 400,
                                               kCrowded, kInlineMax, kMeta);
    loop_.add(endpoint_);
    loop_.start_thread();
    const std::size_t nbytes = kCounts[0] * sizeof(float);
    body_ = reinterpret_cast<float*>(memory_->arena() + memory_->allocator().take(nbytes));
    for (std::size_t i = 0; i < kCounts[0]; ++i) body_[i] = 1;
  }

  std::uint64_t n_acked(std::uint32_t server) const { return n_acked_[server]; }

  // Half of the requests are questions; returns how many pushes there were to each server.
  std::array<std::uint64_t, 2> work(unsigned rounds, unsigned seed,
                                    const std::function<void(std::uint32_t)>& after_answer = {}) {
    std::mt19937 random(seed);
    std::array<std::uint64_t, 2> n_pushes{};
    for (unsigned round = 0; round < rounds; ++round) {
      const bool is_push = random() % 2 == 0;
      const auto server = static_cast<std::uint32_t>(random() % n_servers_);
      n_pushes[server] += is_push;
      const std::uint64_t sequence = is_push ? send_push(server) : send_question(server);
      if (is_push && random() % 2 == 0 && endpoint_->await_ack(sequence, 50'000, taken_) >= 0) {
        acked(sequence);
        if (random() % 4 != 0) taken_ = sequence;  // else as if an interrupt had come
        continue;
      }
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (!take_turn(sequence))
        if (std::chrono::steady_clock::now() > end) fail("no answer came", rank_);
      if (after_answer) after_answer(server);
    }
    return n_pushes;
  }

 private:
  // Sequence numbers ascend on the wire, as dedup wants them to.
  std::uint64_t send_push(std::uint32_t server) {
    const std::string meta = push_meta(kCounts[server]);
    const std::lock_guard lock(sending_);
    FrameHeader header = header_of(Kind::push, server);
    const Chunk body{body_, kCounts[server] * sizeof(float)};
    if (!endpoint_->ask(server, header, {meta.data(), meta.size()}, body))
      fail("a push was refused", rank_);
    ++n_pushed_[server];
    return header.sequence;
  }
  std::uint64_t send_question(std::uint32_t server) {
    const std::lock_guard lock(sending_);
    FrameHeader header = header_of(kQuestion, server);
    header.clock = n_pushed_[server];
    endpoint_->send(server, &header, sizeof header);
    return header.sequence;
  }
  FrameHeader header_of(Kind kind, std::uint32_t server) {
    FrameHeader header{};
    header.kind = kind;
    header.view = kEpoch;
    header.origin = rank_;
    header.sequence = ++sequence_;
    header.table = kTable;
    header.partition = server;
    const std::lock_guard lock(waiting_);
    open_[header.sequence] = {server, kind == Kind::push};
    return header;
  }

  void answered(std::uint64_t sequence) {
    const std::lock_guard lock(waiting_);
    if (!close(sequence)) fail("an answer came twice, or to no question", rank_);
  }
  void acked(std::uint64_t sequence) {  // one that was reported may come once more
    const std::lock_guard lock(waiting_);
    close(sequence);
  }
  bool close(std::uint64_t sequence) {
    const auto at = open_.find(sequence);
    if (at == open_.end()) return false;
    n_acked_[at->second.server] += at->second.is_push;
    open_.erase(at);
    return true;
  }
  bool is_answered(std::uint64_t sequence) {
    const std::lock_guard lock(waiting_);
    return open_.count(sequence) == 0;
  }

  // One thread at a time drives, as in Python.
  bool take_turn(std::uint64_t sequence) {
    if (is_answered(sequence)) return true;
    const std::unique_lock turn(driving_, std::try_to_lock);
    if (!turn.owns_lock()) {
      std::this_thread::yield();
      return false;
    }
    loop_.park(0.001);
    endpoint_->enter();
    const auto frames = endpoint_->collect();
    for (const PipeEndpoint::Ack& ack : endpoint_->take_acks()) acked(ack.sequence);
    for (const auto& [rank, data] : frames) {
      const auto frame = read_frame(reinterpret_cast<const std::byte*>(data.data()), data.size());
      if (rank >= n_servers_ || !frame) fail("a frame is broken", rank_);
      answered(frame->header.sequence);
    }
    endpoint_->leave();
    return is_answered(sequence);
  }

  const std::uint32_t rank_;
  const std::shared_ptr<NodeMemory> memory_;
  Loop loop_;
  std::shared_ptr<PipeEndpoint> endpoint_;
  const std::size_t n_servers_;
  float* body_;
  std::mutex sending_, waiting_, driving_;
  std::uint64_t sequence_ = 0;
  std::array<std::int64_t, 2> n_pushed_{};
  std::array<std::atomic<std::uint64_t>, 2> n_acked_{};
  struct Sent {
    std::uint32_t server;
    bool is_push;
  };
  std::map<std::uint64_t, Sent> open_;  // sent, and not answered
  std::atomic<std::uint64_t> taken_{0};
};

}  // namespace ringcomm::ps
