// The pipes of a node under a sanitizer: clients as threads push to a block that the server's loop
// carries out, and ask what only "Python" can answer, from two threads each, which look for acks by
// themselves or take turns at the endpoint. Every push must count once, and what one sends is taken in
// its order. `ci/sanitize` builds and runs it.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ps_client.hpp"

using namespace ringcomm;
using namespace ringcomm::ps;

namespace {

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

void run(std::uint32_t n_clients, unsigned rounds) {
  std::vector<std::shared_ptr<NodeMemory>> memories;
  for (std::uint32_t rank = 0; rank <= n_clients; ++rank)
    memories.push_back(NodeMemory::create(rank + 1, kArena));
  const std::shared_ptr<NodeMemory>& own = memories[0];
  const auto updater = new_block(room_for_block(*own, kCounts[0]), kCounts[0]);

  std::vector<Mate> mates;
  std::vector<std::unique_ptr<Client>> clients;
  for (std::uint32_t rank = 1; rank <= n_clients; ++rank) {
    const Pipe up = pipe_in(*own), down = pipe_in(*memories[rank]);
    mates.push_back({rank, down, up, memories[rank]});
    clients.push_back(
        std::make_unique<Client>(rank, memories[rank], std::vector<Mate>{{0, up, down, own}}));
  }
  Loop loop(&own->bell(), kCrowded, own);
  const auto endpoint = std::make_shared<PipeEndpoint>(0, own, std::move(mates), true, 2000, kCrowded,
                                                       kInlineMax, kMeta);
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
    threads.emplace_back([&, k] { n_pushes += clients[k / 2]->work(rounds, k)[0]; });
  for (std::thread& each : threads) each.join();
  is_over = true;
  python.join();
  loop.stop();
  require_values(*updater, n_pushes);
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
