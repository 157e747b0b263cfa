// The pipes of a node under a sanitizer: clients as threads push to a block that the server's loop
// carries out, and ask what only "Python" can answer, from two threads each, which look for acks by
// themselves or take turns at the endpoint. Every push must count once, and what one sends is taken in
// its order. `ci/sanitize` builds and runs it.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../loop/loop.hpp"
#include "../ps/pipe_endpoint.hpp"

using namespace ringcomm;
using namespace ringcomm::ps;

namespace {

constexpr std::size_t kArena = 64u << 20, kPipe = 64u << 10, kInline = 15u << 10, kMeta = 900;
constexpr std::size_t kCount = 6000;  // of the block: 24,000 bytes, which travel in shared memory
constexpr std::uint32_t kTable = 3, kEpoch = 1;
constexpr Kind kQuestion = static_cast<Kind>(77);  // what the endpoint does not understand

[[noreturn]] void fail(const char* what, std::uint32_t rank) {
  std::fprintf(stderr, "rank %u: %s\n", rank, what);
  std::_Exit(1);
}

Pipe pipe_in(NodeMemory& memory) {
  const Pipe pipe(memory.arena() + memory.allocator().take(kPipe), kPipe);
  pipe.clear();
  return pipe;
}

// A pipe that is nearly full all the time hands on what was put, in its order.
void fill_a_pipe() {
  alignas(64) static std::byte memory[sizeof(Pipe::Head) + 1024];
  const Pipe pipe(memory, sizeof memory);
  pipe.clear();
  std::mt19937 random(1);
  std::deque<std::string> unread;
  for (int turn = 0; turn < 20'000; ++turn) {
    const std::string text(random() % 400, static_cast<char>('a' + turn % 26));
    const Chunk chunk{text.data(), text.size()};
    while (!pipe.put(&chunk, 1)) {
      const Pipe::Message oldest = pipe.peek();
      if (unread.empty() || oldest.data == nullptr ||
          std::string(reinterpret_cast<const char*>(oldest.data), oldest.nbytes) != unread.front())
        fail("a pipe lost a message that was not read", 0);
      unread.pop_front();
      pipe.pop();
    }
    unread.push_back(text);
  }
}

std::string push_meta(std::size_t n) {
  std::string meta(28, '\0');
  const double weight = 1;
  const std::uint64_t start = 0, count = n;
  std::memcpy(&meta[0], &weight, 8);
  std::memcpy(&meta[8], &start, 8);
  std::memcpy(&meta[16], &count, 8);
  meta[26] = 7;
  return meta + "float32";
}

class Client {
 public:
  Client(std::uint32_t rank, std::shared_ptr<NodeMemory> memory, Pipe from, Pipe to,
         std::shared_ptr<NodeMemory> servers)
      : rank_(rank), memory_(std::move(memory)), loop_(&memory_->bell(), kCrowded, memory_) {
    std::vector<Mate> mates{{0, to, from, std::move(servers)}};
    endpoint_ = std::make_shared<PipeEndpoint>(rank, memory_, std::move(mates), false, 400, kCrowded,
                                               kInline, kMeta);
    loop_.add(endpoint_);
    loop_.start_thread();
    const std::size_t nbytes = kCount * sizeof(float);
    body_ = reinterpret_cast<float*>(memory_->arena() + memory_->allocator().take(nbytes));
    for (std::size_t i = 0; i < kCount; ++i) body_[i] = 1;
  }

  // Half of the requests are questions; returns how many pushes there were.
  std::uint64_t work(unsigned rounds, unsigned seed) {
    std::mt19937 random(seed);
    std::uint64_t n_pushes = 0;
    for (unsigned round = 0; round < rounds; ++round) {
      const bool is_push = random() % 2 == 0;
      n_pushes += is_push;
      const std::uint64_t sequence = is_push ? send_push() : send_question();
      if (is_push && random() % 2 == 0 && endpoint_->await_ack(sequence, 50'000, taken_) >= 0) {
        acked(sequence);
        if (random() % 4 != 0) taken_ = sequence;  // else as if an interrupt had come
        continue;
      }
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (!take_turn(sequence))
        if (std::chrono::steady_clock::now() > end) fail("no answer came", rank_);
    }
    return n_pushes;
  }

 private:
  // Sequence numbers ascend on the wire, as dedup wants them to.
  std::uint64_t send_push() {
    static const std::string meta = push_meta(kCount);
    const std::lock_guard lock(sending_);
    FrameHeader header = header_of(Kind::push);
    const Chunk body{body_, kCount * sizeof(float)};
    if (!endpoint_->ask(0, header, {meta.data(), meta.size()}, body)) fail("a push was refused", rank_);
    ++n_pushed_;
    return header.sequence;
  }
  std::uint64_t send_question() {
    const std::lock_guard lock(sending_);
    FrameHeader header = header_of(kQuestion);
    header.clock = n_pushed_;
    endpoint_->send(0, &header, sizeof header);
    return header.sequence;
  }
  FrameHeader header_of(Kind kind) {
    FrameHeader header{};
    header.kind = kind;
    header.view = kEpoch;
    header.origin = rank_;
    header.sequence = ++sequence_;
    header.table = kTable;
    const std::lock_guard lock(waiting_);
    open_.insert(header.sequence);
    return header;
  }

  void answered(std::uint64_t sequence) {
    const std::lock_guard lock(waiting_);
    if (open_.erase(sequence) != 1) fail("an answer came twice, or to no question", rank_);
  }
  void acked(std::uint64_t sequence) {  // one that was reported may come once more
    const std::lock_guard lock(waiting_);
    open_.erase(sequence);
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
      if (rank != 0 || !frame) fail("a frame is broken", rank_);
      answered(frame->header.sequence);
    }
    endpoint_->leave();
    return is_answered(sequence);
  }

  const std::uint32_t rank_;
  const std::shared_ptr<NodeMemory> memory_;
  Loop loop_;
  std::shared_ptr<PipeEndpoint> endpoint_;
  float* body_;
  std::mutex sending_, waiting_, driving_;
  std::uint64_t sequence_ = 0;
  std::int64_t n_pushed_ = 0;
  std::set<std::uint64_t> open_;  // sent, and not answered
  std::atomic<std::uint64_t> taken_{0};
};

void run(std::uint32_t n_clients, unsigned rounds) {
  std::vector<std::shared_ptr<NodeMemory>> memories;
  for (std::uint32_t rank = 0; rank <= n_clients; ++rank)
    memories.push_back(NodeMemory::create(rank + 1, kArena));
  const std::shared_ptr<NodeMemory>& own = memories[0];
  const std::size_t nbytes = block_nbytes(kCount * sizeof(float));
  const Block block(own->arena() + own->allocator().take(nbytes), kCount * sizeof(float), 0);
  const auto updater = std::make_shared<BlockUpdater>(block, kCount, DType::float32);
  updater->attach(static_cast<int>(Updater::add), 0, {}, 0, 1);
  updater->may_ack = true;

  std::vector<Mate> mates;
  std::vector<std::unique_ptr<Client>> clients;
  for (std::uint32_t rank = 1; rank <= n_clients; ++rank) {
    const Pipe up = pipe_in(*own), down = pipe_in(*memories[rank]);
    mates.push_back({rank, down, up, memories[rank]});
    clients.push_back(std::make_unique<Client>(rank, memories[rank], down, up, own));
  }
  Loop loop(&own->bell(), kCrowded, own);
  const auto endpoint = std::make_shared<PipeEndpoint>(0, own, std::move(mates), true, 2000, kCrowded,
                                                       kInline, kMeta);
  endpoint->enter();
  endpoint->open(kTable, 0, kEpoch, updater);
  endpoint->leave();
  loop.add(endpoint);
  loop.start_thread();

  std::atomic<bool> is_over{false};
  std::thread python([&] {
    std::uint64_t n_by_python = 0;
    while (!is_over) {
      loop.await_news(0.001);
      endpoint->enter();
      for (const auto& [rank, data] : endpoint->collect()) {
        FrameHeader header;
        std::memcpy(&header, data.data(), sizeof header);
        if (header.kind == Kind::push) {  // behind a question of its sender
          const auto* const at = reinterpret_cast<const std::byte*>(data.data());
          const auto frame = read_frame(at, data.size());
          const auto meta = read_push_meta(frame->meta, frame->header.n_meta);
          const std::byte* const body = memories[rank]->arena() + header.place;
          if (!updater->push(header, *meta, body)) fail("a push was not carried out", rank);
          ++n_by_python;
        } else if (n_clients == 1 && endpoint->n_requests + n_by_python !=
                                         static_cast<std::uint64_t>(header.clock)) {
          fail("a question and a push did not come in their order", rank);
        }
        FrameHeader reply{};
        reply.kind = Kind::reply;
        reply.sequence = header.sequence;
        reply.option = header.kind == kQuestion;
        endpoint->send(rank, &reply, sizeof reply);
      }
      endpoint->leave();
    }
  });

  std::atomic<std::uint64_t> n_pushes{0};
  std::vector<std::thread> threads;
  for (std::uint32_t k = 0; k < 2 * n_clients; ++k)
    threads.emplace_back([&, k] { n_pushes += clients[k / 2]->work(rounds, k); });
  for (std::thread& each : threads) each.join();
  is_over = true;
  python.join();
  loop.stop();
  const auto* const values = reinterpret_cast<const float*>(updater->block().values());
  for (std::size_t i = 0; i < kCount; ++i)
    if (values[i] != static_cast<float>(n_pushes)) fail("a push was lost, or counted twice", 0);
  std::printf("%u clients: %llu pushes, %llu of them without Python\n", n_clients,
              static_cast<unsigned long long>(n_pushes),
              static_cast<unsigned long long>(endpoint->n_requests));
}

}  // namespace

int main(int argc, char** argv) {
  fill_a_pipe();
  const auto rounds = static_cast<unsigned>(argc > 1 ? std::atoi(argv[1]) : 300);
  for (const std::uint32_t n : {1u, 3u}) run(n, rounds);
}
