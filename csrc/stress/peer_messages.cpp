// Messages between ranks, of one node and of several, under a sanitizer: ranks as threads send and receive in
// random orders, short and long ones, registered or not, from two threads each; some are given up. A message
// that arrives has its values, those of one mailbox come in their order, and nobody reads an array once
// its send is over. `ci/sanitize` builds and runs it.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../loop/loop.hpp"
#include "../p2p/peer_messages.hpp"
#include "../wire/loopback.hpp"
#include "ranks_as_threads.hpp"

using namespace ringcomm;
using namespace ringcomm::stress;

namespace {

constexpr float kMine = 777;  // what a rank writes once its array is its own again
constexpr std::size_t kCounts[] = {0, 1, 1000, 12288, 17000, 70001, 200003};
constexpr int kPipeTag = 1, kFirstTag = 2, kTags = 50;
constexpr unsigned kPerMailbox = 12;
constexpr std::int64_t kFromAny = 2, kLong = 3;  // tags

struct Letter {
  std::shared_ptr<PeerMessage> rest;  // null: it is over
  std::unique_ptr<Array> array;
};

class Rank {
 public:
  // Ranks that are equal modulo n_nodes share memory.
  Rank(std::size_t rank, Node& node, bool may_read, std::size_t n_nodes, LoopbackHub& hub)
      : rank_(rank), node_(node), loop_(&node.memories[rank]->bell(), kCrowded, node.memories[rank]) {
    std::map<std::uint32_t, std::shared_ptr<NodeMemory>> memories;
    WirePeers others{hub.wire(static_cast<int>(rank)), {}, kPipeTag, kFirstTag, 1, kTags};
    for (std::size_t i = 0; i < node.memories.size(); ++i) {
      if (i % n_nodes == rank % n_nodes)
        memories[static_cast<std::uint32_t>(i)] = node.memories[i];
      else
        others.ranks[static_cast<std::uint32_t>(i)] = static_cast<int>(i);
    }
    messages_ = std::make_shared<PeerMessages>(static_cast<std::uint32_t>(rank), std::move(memories),
                                               kCrowded, may_read, std::move(others));
    loop_.start_thread();
  }
  ~Rank() {
    loop_.stop();
    messages_->close_wires(0);
    messages_->retire();
  }

  // Sends kPerMailbox messages with each of these tags to each rank, itself included.
  void send_all(unsigned seed, const std::vector<std::int64_t>& tags) {
    std::mt19937 random(seed);
    std::vector<Letter> letters;
    for (const std::int64_t tag : tags)
      for (unsigned i = 0; i < kPerMailbox; ++i)
        for (std::size_t to = 0; to < node_.memories.size(); ++to)
          letters.push_back(send(to, tag, i, random() % 2 == 0));
    std::shuffle(letters.begin(), letters.end(), random);
    for (Letter& letter : letters) wait(letter);
  }

  // Receives what all send with this tag: from one after the other, or from whoever comes first.
  void receive_all(unsigned seed, std::int64_t tag) {
    std::mt19937 random(seed);
    std::vector<unsigned> n_come(node_.memories.size(), 0);
    for (unsigned i = 0; i < kPerMailbox; ++i)
      for (std::size_t from = 0; from < node_.memories.size(); ++from) {
        Array out(*node_.memories[rank_], count_of(i, tag), random() % 2 == 0);
        std::uint32_t source = kAnyRank;
        const auto rest =
            messages_->receive(envelope(tag == kFromAny ? kAnyRank : from, out.count()), tag,
                               out.bytes(), random() % 2 == 0 ? 0 : 100'000, source);
        if (rest) {
          loop_.add(rest);
          while (!rest->is_over()) loop_.park(0.005);
          if (!rest->fault().empty()) fail(rest->fault().c_str(), rank_, i);
          source = rest->source();
        }
        const unsigned number = n_come[source]++;
        if (number != i && tag != kFromAny) fail("a message came out of its order", rank_, i);
        require(out, source, tag, number);
      }
  }

  // Sends long messages, and gives up those that are not over after a moment, as after an interrupt. What
  // is written to the arrays then must not arrive. (Others may read them still, at the same time:
  // ThreadSanitizer would call that a race.)
  void give_some_up(unsigned seed, std::size_t to) {
    std::mt19937 random(seed);
    std::vector<Letter> letters;
    for (unsigned i = 0; i < kPerMailbox; ++i) letters.push_back(send(to, kLong, i, random() % 2 == 0));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    for (Letter& letter : letters) {
      if (letter.rest) loop_.abandon(*letter.rest);
#ifndef __SANITIZE_THREAD__
      for (std::size_t k = letter.array->count(); k-- > 0;) letter.array->data()[k] = kMine;
#endif
    }
    given_up_ = std::move(letters);
  }

  // Receives them until one fails, or nothing comes any more.
  unsigned receive_some(std::size_t from) {
    for (unsigned i = 0; i < kPerMailbox; ++i) {
      Array out(*node_.memories[rank_], count_of(i, kLong), i % 2 == 0);
      std::uint32_t source = kAnyRank;
      const auto rest = messages_->receive(envelope(from, out.count()), kLong, out.bytes(), 0, source);
      if (rest) {
        loop_.add(rest);
        for (int k = 0; k < 10 && !rest->is_over(); ++k) loop_.park(0.005);
        loop_.abandon(*rest);
        if (!rest->fault().empty()) return i;
      }
      require(out, from, kLong, i);
    }
    return kPerMailbox;
  }

 private:
  static std::size_t count_of(unsigned i, std::int64_t tag) {
    if (tag == kFromAny) return 3000;
    if (tag == kLong) return 200003;
    return kCounts[(i * 5 + static_cast<unsigned>(tag)) % (sizeof kCounts / sizeof *kCounts)];
  }

  Letter send(std::size_t to, std::int64_t tag, unsigned i, bool is_registered) {
    Letter letter;
    letter.array = std::make_unique<Array>(*node_.memories[rank_], count_of(i, tag), is_registered);
    for (std::size_t k = 0; k < letter.array->count(); ++k)
      letter.array->data()[k] = value(i, rank_, static_cast<std::size_t>(tag));
    letter.rest = messages_->send(envelope(to, letter.array->count()), tag, letter.array->bytes(), 0);
    if (letter.rest) loop_.add(letter.rest);
    return letter;
  }

  void require(Array& out, std::size_t source, std::int64_t tag, unsigned number) const {
    for (std::size_t k = 0; k < out.count(); ++k)
      if (out.data()[k] != value(number, source, static_cast<std::size_t>(tag)))
        fail("a message has other values", rank_, number);
  }

  SharedEnvelope envelope(std::size_t rank, std::size_t count) const {
    return std::make_shared<const Envelope>(
        Envelope{static_cast<std::uint32_t>(rank), 1, "float32", count * sizeof(float)});
  }

  void wait(Letter& letter) {
    while (letter.rest && !letter.rest->is_over()) std::this_thread::yield();
    for (std::size_t k = 0; k < letter.array->count(); ++k) letter.array->data()[k] = kMine;
    letter.array.reset();
  }

  const std::size_t rank_;
  Node& node_;
  std::shared_ptr<PeerMessages> messages_;
  Loop loop_;
  std::vector<Letter> given_up_;
};

void run(std::size_t size, unsigned seed, bool may_read, std::size_t n_nodes) {
  Node node(size);
  const auto hub = std::make_shared<LoopbackHub>(static_cast<int>(size));
  std::vector<std::unique_ptr<Rank>> ranks;
  for (std::size_t rank = 0; rank < size; ++rank)
    ranks.push_back(std::make_unique<Rank>(rank, node, may_read, n_nodes, *hub));
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      ranks[rank]->send_all(seed * 31 + static_cast<unsigned>(rank), {0, 1, kFromAny});
    });
    threads.emplace_back([&, rank] {
      for (const std::int64_t tag : {kFromAny, std::int64_t{1}, std::int64_t{0}})
        ranks[rank]->receive_all(seed * 37 + static_cast<unsigned>(rank), tag);
    });
  }
  for (std::thread& each : threads) each.join();
}

unsigned give_up(unsigned seed, bool may_read, std::size_t n_nodes) {
  Node node(2);
  const auto hub = std::make_shared<LoopbackHub>(2);
  Rank first(0, node, may_read, n_nodes, *hub), second(1, node, may_read, n_nodes, *hub);
  unsigned n_come = 0;
  std::thread sender([&] { first.give_some_up(seed, 1); });
  std::thread receiver([&] { n_come = second.receive_some(0); });
  sender.join();
  receiver.join();
  return n_come;
}

}  // namespace

int main(int argc, char** argv) {
  const auto rounds = static_cast<unsigned>(argc > 1 ? std::atoi(argv[1]) : 300) / 10 + 1;
  unsigned n_come = 0;
  for (unsigned seed = 0; seed < rounds; ++seed) {
    run(1 + seed % 4, seed, seed % 2 == 0, 1 + seed % 3);
    n_come += give_up(seed, seed % 2 != 0, 1 + seed / 2 % 2);
  }
  std::printf("messages: %u rounds; %u of %u came although their sender gave up\n", rounds, n_come,
              rounds * kPerMailbox);
}
