// What a parameter server keeps, under a sanitizer: random operations on two shards of a hash table
// with threads that read beside each other, partitions that move between them, every updater, and a
// dense block that is read while it is written.
// `ci/sanitize` builds and runs it.
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "../ps/block.hpp"
#include "../ps/shard.hpp"

using namespace ringcomm;
using namespace ringcomm::ps;

namespace {

constexpr std::size_t kDim = 5, kKeys = 700, kMaxRows = 30;
constexpr std::uint32_t kPartitions = 8;
constexpr std::uint64_t kSnapshot = 7;
const std::vector<std::vector<double>> kHyper = {
    {}, {}, {.1, .9, 0, .01, 1, 0}, {.1, .1, 0, 1, 1e-8, 0}, {.1, .9, .99, 1e-8, .01, 1, 0, 0},
    {.1, .9, 1e-8, 0, .5, 1, 0}, {1, .9, 1e-6, 0, 0}, {.1, .9, .99, 1e-8, 0, .004, 0, 0},
    {.1, .9, .99, 1e-8, 0, 0, 0}, {.1, 1, .1, .1}, {.1, 1e-8}};

using Keys = std::vector<std::uint64_t>;

// What a read has found.
struct Found {
  std::vector<std::byte> rows;
  std::size_t n = 0;

  bool operator!=(const Found& other) const { return n != other.n || rows != other.rows; }
};

[[noreturn]] void fail(const char* what, unsigned round) {
  std::fprintf(stderr, "round %u: %s\n", round, what);
  std::_Exit(1);
}

std::shared_ptr<RowSpec> spec_of(int code, DType dtype) {
  auto spec = std::make_shared<RowSpec>();
  const double normal[] = {0, 1};
  spec->dim = kDim;
  spec->dtype = dtype;
  spec->rule = rule_of(code, kHyper[static_cast<std::size_t>(code)].data(),
                       kHyper[static_cast<std::size_t>(code)].size());
  spec->initial = initial_of(2, normal, 2, 1, 2);
  spec->admission = {2, 1, 64};
  spec->eviction = {30, kMaxRows, code % 2 == 0 ? Order::lru : Order::lfu};
  return spec;
}

// The rows of a partition as arrays, with room of their own.
class Arrays {
 public:
  explicit Arrays(const HashPartition& rows)
      : which_(rows.all()),
        keys_(which_.size()),
        values_(which_.size() * kDim),
        slots_(which_.size() * rows.spec().slot_width()),
        times_(which_.size()),
        counts_(which_.size()),
        steps_(which_.size()),
        candidates_(rows.candidates()) {
    rows.copy(which_, view());
  }

  std::size_t size() const { return which_.size(); }
  const auto& candidates() const { return candidates_; }
  void load_to(HashPartition& rows) {
    rows.load(view(), size());
    for (const auto& [key, count] : candidates_) rows.load_candidate(key, count);
  }

 private:
  RowArrays view() {
    return {keys_.data(),   values_.data(), slots_.data(),
            counts_.data(), steps_.data(),  times_.data()};
  }

  std::vector<Row> which_;
  Keys keys_;
  std::vector<double> values_, slots_, times_;  // bytes of either dtype
  std::vector<std::uint32_t> counts_, steps_;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> candidates_;
};

// One hash table on two servers.
class Table {
 public:
  Table(int code, DType dtype, unsigned seed)
      : spec_(spec_of(code, dtype)), random_(seed), owners_(kPartitions) {
    for (std::uint32_t i = 0; i < kPartitions; ++i) owners_[i] = i % 2;
    for (std::uint32_t i = 0; i < 2; ++i) shards_[i] = std::make_unique<Shard>(spec_, owners_, i);
  }

  void step(unsigned round) {
    for (std::uint32_t server = 0; server < 2; ++server) {
      push(server, round);
      if (round % 3 == 0) erase(server, round);
      if (round % 5 == 0) shards_[server]->evict(round, round + 1, 1 + random_() % 200);
      if (round % 7 == 0) read_while_pushed_to(server, round);
      if (round % 10 == 0) hold(server, round);
    }
    if (round % 25 == 24) move(round);
  }

 private:
  // Keys of a server, some of them twice.
  Keys some_keys(std::uint32_t server) {
    Keys keys;
    for (std::size_t n = random_() % 80; n != 0; --n) {
      const std::uint64_t key = ~(random_() % kKeys * 0x100000001ull);
      if (owners_[partition_of(key, kPartitions)] == server) keys.push_back(key);
    }
    return keys;
  }

  std::uint32_t at_home(std::uint32_t server) const {
    std::uint32_t i = 0;
    while (owners_[i] != server) ++i;
    return i;
  }

  // Two parts, as of two workers in a round; gradients come in any dtype.
  void push(std::uint32_t server, unsigned round) {
    const Keys keys = some_keys(server);
    const std::vector<double> grads(keys.size() * kDim, 0.5);  // bytes of any dtype
    const std::vector<std::uint32_t> places(keys.size(), 0);
    const DType grad = random_() % 3 == 0 ? DType::bfloat16 : spec_->dtype;
    Push push{keys.data(), keys.size(), {{0, grad, grads.data(), 1}}, spec_->rule,
              static_cast<double>(round), round + 1};
    if (keys.size() > 1) {
      push.parts.push_back({keys.size() / 2, spec_->dtype, grads.data(), 3, places.data()});
      push.divisor = 2;
    }
    const Pushed pushed = shards_[server]->push(push);
    if (pushed.applied + pushed.rejected > keys.size()) fail("more keys than were pushed", round);
    read_beside_each_other(server, keys);
  }

  void erase(std::uint32_t server, unsigned round) {
    Keys keys = some_keys(server);
    shards_[server]->erase(keys.data(), keys.size() / 4, round + 1);
    keys.push_back(key_of_another(server));
    try {
      shards_[server]->erase(keys.data(), keys.size(), round + 1);
    } catch (const std::invalid_argument&) {
      return;
    }
    fail("a key of another server was taken", round);
  }

  std::uint64_t key_of_another(std::uint32_t server) const {
    std::uint64_t key = 0;
    while (owners_[partition_of(key, kPartitions)] == server) ++key;
    return key;
  }

  Found gather(std::uint32_t server, const Keys& keys) const {
    Found found{room_for(keys)};
    found.n = shards_[server]->gather(keys.data(), keys.size(), found.rows.data(), nullptr,
                                      Missing::zero);
    return found;
  }

  Found gather_held(std::uint32_t server, const Keys& keys) const {
    Found found{room_for(keys)};
    found.n = shards_[server]->gather_held(kSnapshot, keys.data(), keys.size(), found.rows.data(),
                                           nullptr, Missing::zero);
    return found;
  }

  std::vector<std::byte> room_for(const Keys& keys) const {
    return std::vector<std::byte>(keys.size() * kDim * spec_->itemsize());
  }

  void read_beside_each_other(std::uint32_t server, const Keys& keys) const {
    std::array<std::thread, 2> readers;
    for (auto& reader : readers)
      reader = std::thread([&] {
        gather(server, keys);
        std::vector<std::uint32_t> counts(keys.size()), steps(keys.size());
        std::vector<double> times(keys.size());
        shards_[server]->metadata(keys.data(), keys.size(), counts.data(), steps.data(),
                                  times.data());
        shards_[server]->n_keys();
      });
    for (auto& reader : readers) reader.join();
  }

  // Whoever comes second is refused, and reads or writes nothing.
  void read_while_pushed_to(std::uint32_t server, unsigned round) {
    const Keys keys = some_keys(server), others = some_keys(server);
    const std::vector<double> grads(others.size() * kDim, 0.5);
    std::thread reader([&] {
      try {
        gather(server, keys);
      } catch (const std::logic_error&) {
      }
    });
    try {
      shards_[server]->push({others.data(), others.size(), {{0, spec_->dtype, grads.data(), 1}},
                             spec_->rule, static_cast<double>(round), round + 1});
    } catch (const std::logic_error&) {
    }
    reader.join();
  }

  // A snapshot stays as it is, whatever is done to the rows.
  void hold(std::uint32_t server, unsigned round) {
    Shard& shard = *shards_[server];
    const Keys keys = some_keys(server);
    const Found then = gather(server, keys);
    shard.hold(kSnapshot);
    for (unsigned i = 0; i < 4; ++i) {
      push(server, round);
      if (i == 1) erase(server, round);
      if (i == 2) shard.evict(round, round + 1, kKeys);
      if (i == 3) shard.own(at_home(server))->clear();
      std::array<Found, 2> held;
      std::array<std::thread, 2> readers;
      for (std::size_t k = 0; k < readers.size(); ++k)
        readers[k] = std::thread([&, k] { held[k] = gather_held(server, keys); });
      for (auto& reader : readers) reader.join();
      if (held[0] != then || held[1] != then) fail("a snapshot has changed", round);
    }
    shard.release(kSnapshot);
  }

  // A partition goes to the other server, while rows of it are read for a checkpoint.
  void move(unsigned round) {
    const auto part = static_cast<std::uint32_t>(random_() % kPartitions);
    const std::uint32_t from = owners_[part], to = 1 - from;
    if (is_last(part)) return;  // each server keeps one
    const std::shared_ptr<HashPartition> rows = shards_[from]->own(part);
    Arrays arrays(*rows);
    std::thread saving([&] { Arrays{*rows}; });
    const Keys keys = keys_in(part);
    const Found before = gather(from, keys);
    saving.join();
    const std::shared_ptr<HashPartition> moved = shards_[to]->own(part);
    arrays.load_to(*moved);
    shards_[to]->add_keys(part, arrays.size());
    shards_[from]->disown(part);
    owners_[part] = to;
    if (moved->size() != arrays.size()) fail("rows were lost on the way", round);
    if (moved->candidates() != arrays.candidates()) fail("counts were lost on the way", round);
    if (gather(to, keys) != before) fail("rows have changed on the way", round);
  }

  bool is_last(std::uint32_t part) const {
    for (std::uint32_t i = 0; i < kPartitions; ++i)
      if (i != part && owners_[i] == owners_[part]) return false;
    return true;
  }

  static Keys keys_in(std::uint32_t part) {
    Keys keys;
    for (std::uint64_t i = 0; i < kKeys; ++i)
      if (partition_of(~(i * 0x100000001ull), kPartitions) == part)
        keys.push_back(~(i * 0x100000001ull));
    return keys;
  }

  std::shared_ptr<RowSpec> spec_;
  std::mt19937_64 random_;
  std::vector<std::uint32_t> owners_;
  std::array<std::unique_ptr<Shard>, 2> shards_;
};

void write_and_read(unsigned rounds) {
  constexpr std::size_t kCount = 3000;
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> room(block_nbytes(kCount * sizeof(float)) / sizeof(Line) + 1);
  auto* const memory = room.data()->bytes;
  Block block(memory, kCount * sizeof(float), 0);
  std::atomic<bool> is_over{false};
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i)
    readers.emplace_back([&] {
      std::vector<float> out(kCount);
      while (!is_over.load()) {
        const std::int64_t version = read_block(memory, out.data(), 0, kCount * sizeof(float), 4);
        if (version == -1) continue;
        for (const float x : out)
          if (x != static_cast<float>(version)) fail("torn", static_cast<unsigned>(version));
      }
    });
  const std::vector<float> one(kCount, 1);
  for (unsigned round = 0; round < rounds; ++round) {
    DenseUpdate update{};
    update.rule = rule_of(1, nullptr, 0);
    update.step = 1;
    update.dtype = update.grad_dtype = DType::float32;
    update.rows = 1;
    update.grad = one.data();
    update.count = kCount;
    block.apply(update);
  }
  is_over.store(true);
  for (auto& reader : readers) reader.join();
}

}  // namespace

int main(int argc, char** argv) {
  const auto rounds = static_cast<unsigned>(argc > 1 ? std::atoi(argv[1]) : 300);
  for (const DType dtype : {DType::float32, DType::float64})
    for (int code = 0; code < static_cast<int>(kHyper.size()); ++code) {
      Table table(code, dtype, static_cast<unsigned>(code));
      for (unsigned round = 0; round < rounds; ++round) table.step(round);
    }
  write_and_read(rounds * 10);
  std::printf("parameter server: %u rounds of %zu updaters\n", rounds, kHyper.size());
}
