// Two servers under a sanitizer, each with a copy of the other's block: clients as threads push to
// both, ask what only "Python" can answer, which has to keep pushes behind that, and read blocks in
// place. Every push must count once in both copies, and a read must have what was acknowledged, or
// read before, and nothing that the copy has not. `ci/sanitize` builds and runs it.
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ps_client.hpp"

using namespace ringcomm;
using namespace ringcomm::ps;

namespace {

constexpr Copy kForPython = static_cast<Copy>(99);  // a frame that both copies carry out in Python

const std::byte* bytes_of(const std::string& text) {
  return reinterpret_cast<const std::byte*>(text.data());
}

FrameHeader header_of(const std::string& frame) {
  FrameHeader header;
  std::memcpy(&header, frame.data(), sizeof header);
  return header;
}

// A server, which is the primary of the home with its number, and has a copy of the other.
class Server {
 public:
  Server(std::uint32_t rank, std::vector<std::shared_ptr<NodeMemory>> memories,
         std::vector<Mate> mates)
      : rank_(rank),
        memories_(std::move(memories)),
        loop_(&memory()->bell(), kCrowded, memory()),
        endpoint_(std::make_shared<PipeEndpoint>(rank, memory(), std::move(mates), true, 2000,
                                                 kCrowded, kInlineMax, kMeta)) {
    endpoint_->enter();
    for (std::uint32_t number : {0u, 1u}) {
      homes[number] = endpoint_->begin_home(number);
      rooms_[number] = room_for_block(*memory(), kCounts[number]);
      blocks[number] = new_block(rooms_[number], kCounts[number]);
      blocks[number]->block().set_may_read(true);
      endpoint_->open(kTable, number, kEpoch, blocks[number], homes[number]);
    }
    homes[rank]->lead(1 - rank);
    homes[1 - rank]->follow(1 - rank);
    endpoint_->leave();
    loop_.add(endpoint_);
    loop_.start_thread();
    python_ = std::thread([this] { serve(); });
  }

  void stop() {
    is_over_ = true;
    python_.join();
    loop_.stop();
  }

  // Reads a block in place: how many pushes are in it; -1: it cannot be read so.
  std::int64_t read(std::uint32_t number) const {
    std::vector<float> out(kCounts[number]);
    const std::int64_t clock = read_open_block(*memory(), rooms_[number], out.data(), 0,
                                               out.size() * sizeof(float), 0, 16);
    if (clock < 0) return -1;
    for (const float each : out)
      if (each != static_cast<float>(clock)) fail("torn values were read", rank_);
    return clock;
  }
  void withdraw() const { memory()->withdraw(); }

  std::array<std::shared_ptr<HomePushes>, 2> homes;
  std::array<std::shared_ptr<BlockUpdater>, 2> blocks;
  std::uint64_t n_by_python = 0;

 private:
  const std::shared_ptr<NodeMemory>& memory() const { return memories_[rank_]; }

  void serve() {
    while (!is_over_) {
      loop_.await_news(0.001);
      endpoint_->enter();
      for (const auto& [source, frame] : endpoint_->collect()) take(source, frame);
      homes[rank_]->is_kept = !kept_.empty();
      endpoint_->leave();
    }
  }

  void take(std::uint32_t source, const std::string& frame) {
    const FrameHeader header = header_of(frame);
    if (header.kind != Kind::record) {
      keep(source, frame);
    } else if (header.option == static_cast<std::uint32_t>(Copy::done)) {
      endpoint_->complete(*homes[rank_], header.sequence);
      carry_out(header.sequence);
    } else {
      follow(source, frame, header);
    }
  }

  // At the primary: a push behind a question, or a question behind pushes.
  void keep(std::uint32_t source, const std::string& frame) {
    HomePushes& home = *homes[rank_];
    if (header_of(frame).kind != Kind::push) {
      kept_.push_back({home.last(), source, frame});
      if (kept_.size() == 1 && home.n_under_way() == 0) carry_out(home.last());
      return;
    }
    const std::uint64_t number = home.next();
    kept_.push_back({number, source, frame});
    FrameHeader record = record_of(kForPython, number);
    record.origin = source;
    record.n_meta = static_cast<std::uint32_t>(frame.size());
    const std::string head(reinterpret_cast<const char*>(&record), sizeof record);
    const std::string whole = head + frame;
    endpoint_->send(1 - rank_, whole.data(), whole.size());
  }

  void carry_out(std::uint64_t number) {
    while (!kept_.empty() && kept_.front().number <= number) {
      const Kept kept = std::move(kept_.front());
      kept_.pop_front();
      const FrameHeader asked = header_of(kept.frame);
      FrameHeader reply{};
      reply.kind = Kind::reply;
      reply.sequence = asked.sequence;
      reply.option = asked.kind == kQuestion;
      if (asked.kind == Kind::push)
        apply(rank_, kept.source, kept.frame);
      else if (blocks[rank_]->block().clock() < asked.clock)
        fail("a question has overtaken a push of its sender", rank_);
      endpoint_->send(kept.source, &reply, sizeof reply);
    }
  }

  // At the follower, what stands behind a record of Python's, and that.
  void follow(std::uint32_t source, const std::string& data, const FrameHeader& header) {
    if (header.option == static_cast<std::uint32_t>(Copy::push)) {
      const auto record = read_frame(bytes_of(data), data.size());
      endpoint_->follow(*homes[1 - rank_], {record->meta, record->header.n_meta},
                        {record->body, record->header.n_body});
    } else {
      apply(1 - rank_, header.origin, data.substr(sizeof header, header.n_meta));
    }
    const FrameHeader done = record_of(Copy::done, header.sequence, source);
    endpoint_->send(source, &done, sizeof done);
  }

  void apply(std::uint32_t number, std::uint32_t source, const std::string& data) {
    const auto frame = read_frame(bytes_of(data), data.size());
    const auto meta = read_push_meta(frame->meta, frame->header.n_meta);
    const bool is_inline = frame->header.where == Where::inline_;
    const std::byte* const body =
        is_inline ? frame->body : memories_[source]->arena() + frame->header.place;
    if (!blocks[number]->push(frame->header, *meta, body)) fail("a push was not carried out", source);
    ++n_by_python;
  }

  FrameHeader record_of(Copy option, std::uint64_t sequence) const {
    return record_of(option, sequence, rank_);
  }
  static FrameHeader record_of(Copy option, std::uint64_t sequence, std::uint32_t number) {
    FrameHeader record{};
    record.kind = Kind::record;
    record.home = number + 1;
    record.option = static_cast<std::uint32_t>(option);
    record.sequence = sequence;
    return record;
  }

  struct Kept {
    std::uint64_t number;
    std::uint32_t source;
    std::string frame;
  };

  const std::uint32_t rank_;
  std::array<std::byte*, 2> rooms_{};
  const std::vector<std::shared_ptr<NodeMemory>> memories_;
  Loop loop_;
  const std::shared_ptr<PipeEndpoint> endpoint_;
  std::deque<Kept> kept_;
  std::atomic<bool> is_over_{false};
  std::thread python_;
};

// A reader: what it finds at a primary has what was acknowledged and read before; so has the copy.
class Reader {
 public:
  explicit Reader(const std::array<std::unique_ptr<Server>, 2>& servers) : servers_(servers) {}

  void read(std::uint32_t number, const Client& client) {
    const auto least = static_cast<std::int64_t>(client.n_acked(number));
    const std::int64_t shown = shown_[number];
    const std::int64_t found = servers_[number]->read(number);
    if (found < 0) return;
    if (found < least) fail("a read misses what was acknowledged", number);
    if (found < shown) fail("a read misses what was read before", number);
    for (std::int64_t before = shown; before < found;)
      if (shown_[number].compare_exchange_weak(before, found)) break;
    const std::int64_t copied = servers_[1 - number]->read(number);
    if (copied >= 0 && copied < found) fail("a read shows what the copy has not", number);
    ++n_reads;
  }

  std::atomic<std::uint64_t> n_reads{0};

 private:
  const std::array<std::unique_ptr<Server>, 2>& servers_;
  std::array<std::atomic<std::int64_t>, 2> shown_{};
};

void run(std::uint32_t n_clients, unsigned rounds) {
  const std::uint32_t n_ranks = 2 + n_clients;
  std::vector<std::shared_ptr<NodeMemory>> memories;
  for (std::uint32_t rank = 0; rank < n_ranks; ++rank)
    memories.push_back(NodeMemory::create(rank + 1, kArena));
  std::vector<std::vector<Mate>> mates(n_ranks);
  for (std::uint32_t server : {0u, 1u})
    for (std::uint32_t rank = server + 1; rank < n_ranks; ++rank) {
      const Pipe up = pipe_in(*memories[server]), down = pipe_in(*memories[rank]);
      mates[server].push_back({rank, down, up, memories[rank]});
      mates[rank].push_back({server, up, down, memories[server]});
    }
  std::array<std::unique_ptr<Server>, 2> servers;
  for (std::uint32_t rank : {0u, 1u})
    servers[rank] = std::make_unique<Server>(rank, memories, std::move(mates[rank]));
  std::vector<std::unique_ptr<Client>> clients;
  for (std::uint32_t rank = 2; rank < n_ranks; ++rank)
    clients.push_back(std::make_unique<Client>(rank, memories[rank], std::move(mates[rank])));

  Reader reader(servers);
  std::array<std::atomic<std::uint64_t>, 2> n_pushes{};
  std::vector<std::thread> threads;
  for (std::uint32_t k = 0; k < 2 * n_clients; ++k)
    threads.emplace_back([&, k] {
      const Client& client = *clients[k / 2];
      const auto n = clients[k / 2]->work(
          rounds, k, [&](std::uint32_t server) { reader.read(server, client); });
      for (std::size_t server : {0, 1}) n_pushes[server] += n[server];
    });
  for (std::thread& each : threads) each.join();
  for (const auto& server : servers) server->stop();
  std::uint64_t n_by_python = 0;
  for (std::uint32_t rank : {0u, 1u}) {
    n_by_python += servers[rank]->n_by_python;
    for (std::uint32_t number : {0u, 1u})
      require_values(*servers[rank]->blocks[number], n_pushes[number]);
    if (servers[rank]->read(rank) < 0) fail("a block is closed", rank);
    servers[rank]->withdraw();
    if (servers[rank]->read(rank) >= 0) fail("memory was read that is withdrawn", rank);
  }
  std::printf("%u clients: %llu pushes, %llu of 2 for each by Python; %llu reads\n", n_clients,
              static_cast<unsigned long long>(n_pushes[0] + n_pushes[1]),
              static_cast<unsigned long long>(n_by_python),
              static_cast<unsigned long long>(reader.n_reads));
}

}  // namespace

int main(int argc, char** argv) {
  const auto rounds = static_cast<unsigned>(argc > 1 ? std::atoi(argv[1]) : 300);
  for (const std::uint32_t n : {1u, 3u}) run(n, rounds);
}
