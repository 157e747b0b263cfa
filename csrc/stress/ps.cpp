// What a parameter server keeps, under a sanitizer: random operations on partitions with threads
// that read beside each other, every updater, and a dense block that is read while it is written.
// `ci/sanitize` builds and runs it.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../ps/block.hpp"
#include "../ps/rows.hpp"

using namespace ringcomm;
using namespace ringcomm::ps;

namespace {

constexpr std::size_t kDim = 5, kKeys = 700;
const std::vector<std::vector<double>> kHyper = {
    {}, {}, {.1, .9, 0, .01, 1, 0}, {.1, .1, 0, 1, 1e-8, 0}, {.1, .9, .99, 1e-8, .01, 1, 0, 0},
    {.1, .9, 1e-8, 0, .5, 1, 0}, {1, .9, 1e-6, 0, 0}, {.1, .9, .99, 1e-8, 0, .004, 0, 0},
    {.1, .9, .99, 1e-8, 0, 0, 0}, {.1, 1, .1, .1}, {.1, 1e-8}};

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
  spec->eviction = {30, 300, code % 2 == 0 ? Order::lru : Order::lfu};
  spec->max_tombstones = 50;
  return spec;
}

class Partition {
 public:
  Partition(int code, DType dtype, unsigned seed)
      : rows_(spec_of(code, dtype)), dtype_(dtype), random_(seed) {}

  void step(unsigned round) {
    std::vector<std::uint64_t> keys(random_() % 40);
    for (auto& key : keys) key = ~(random_() % kKeys * 0x100000001ull);
    const std::vector<double> grads(keys.size() * kDim, 0.5);  // bytes of any dtype
    const DType grad = random_() % 3 == 0 ? DType::bfloat16 : dtype_;
    rows_.push({keys.data(), keys.size(), {{0, grad, grads.data(), 1}}, rows_.spec().rule,
                static_cast<double>(round), round + 1});
    read_beside_each_other(keys);
    if (round % 3 == 0) rows_.erase(keys.data(), keys.size() / 4, round + 1);
    if (round % 5 == 0) rows_.evict(round, round + 1, 1 + random_() % 200);
    if (round % 50 == 49) move(round);
    if (round % 400 == 399) rows_.clear();
  }

 private:
  void read_beside_each_other(const std::vector<std::uint64_t>& keys) {
    std::vector<std::thread> readers;
    for (int i = 0; i < 2; ++i)
      readers.emplace_back([&] {
        std::vector<double> out(keys.size() * kDim);
        rows_.gather(keys.data(), keys.size(), out.data(), Missing::init);
      });
    for (auto& reader : readers) reader.join();
  }

  void move(unsigned round) {
    const Scan scan = rows_.scan(0, std::numeric_limits<std::size_t>::max());
    const std::size_t n = scan.rows.size(), width = rows_.spec().slot_width();
    if (n != rows_.size()) fail("a scan has other rows than there are", round);
    std::vector<std::uint64_t> keys(n), stamps(n);
    std::vector<std::uint32_t> counts(n), steps(n);
    std::vector<double> values(n * kDim), slots(n * width), times(n);
    const RowArrays arrays{keys.data(),  values.data(), slots.data(), counts.data(),
                           steps.data(), times.data(),  stamps.data()};
    rows_.copy(scan.rows, arrays);
    rows_.clear();
    rows_.load(arrays, n);
    if (rows_.size() != n) fail("rows were lost on the way", round);
  }

  Rows rows_;
  DType dtype_;
  std::mt19937_64 random_;
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
      Partition partition(code, dtype, static_cast<unsigned>(code));
      for (unsigned round = 0; round < rounds; ++round) partition.step(round);
    }
  write_and_read(rounds * 10);
  std::printf("parameter server: %u rounds of %zu updaters\n", rounds, kHyper.size());
}
