#include "frame.hpp"

#include <cstring>

namespace ringcomm::ps {
namespace {

constexpr std::size_t padded(std::size_t n) { return (n + 7) / 8 * 8; }

template <class T>
T read(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

std::optional<DType> dtype_named(std::string_view name) {
  if (name == "float32") return DType::float32;
  if (name == "float64") return DType::float64;
  if (name == "float16") return DType::float16;
  if (name == "bfloat16") return DType::bfloat16;
  return std::nullopt;
}

}  // namespace

std::optional<Frame> read_frame(const std::byte* data, std::size_t nbytes) {
  if (nbytes < sizeof(FrameHeader)) return std::nullopt;
  Frame frame{};
  std::memcpy(&frame.header, data, sizeof frame.header);
  frame.meta = data + sizeof(FrameHeader);
  const std::size_t rest = nbytes - sizeof(FrameHeader);
  const bool is_inline = frame.header.where == Where::inline_;
  if (frame.header.n_meta > rest || frame.header.n_body > (is_inline ? rest : ~std::uint64_t{0}))
    return std::nullopt;
  const std::size_t meta = padded(frame.header.n_meta);
  if (meta + (is_inline ? padded(frame.header.n_body) : 0) != rest) return std::nullopt;
  frame.body = is_inline ? frame.meta + meta : nullptr;
  return frame;
}

std::optional<CopiedPush> read_copied_push(const std::byte* meta, std::size_t nbytes) {
  if (nbytes < sizeof(CopiedPushHead)) return std::nullopt;
  const auto head = read<CopiedPushHead>(meta);
  if (head.header.kind != Kind::push || head.header.n_meta != nbytes - sizeof head)
    return std::nullopt;
  return CopiedPush{static_cast<std::uint32_t>(head.source), head.header, meta + sizeof head};
}

// ringcomm/ps/protocol/frame_meta.py packs it: weight, start, n, flags, length of the dtype's name,
// number of hyper-parameters, then the name and these.
std::optional<PushMeta> read_push_meta(const std::byte* meta, std::size_t nbytes) {
  constexpr std::size_t kFixed = 28;
  if (nbytes < kFixed) return std::nullopt;
  PushMeta read_as{};
  read_as.start = read<std::uint64_t>(meta + 8);
  read_as.n = read<std::uint64_t>(meta + 16);
  read_as.flags = read<std::uint16_t>(meta + 24);
  const auto n_name = read<std::uint8_t>(meta + 26);
  read_as.n_hyper = read<std::uint8_t>(meta + 27);
  if (read_as.n_hyper > kMaxHyper || nbytes != kFixed + n_name + 8 * read_as.n_hyper)
    return std::nullopt;
  const auto dtype = dtype_named({reinterpret_cast<const char*>(meta) + kFixed, n_name});
  if (!dtype) return std::nullopt;
  read_as.dtype = *dtype;
  std::memcpy(read_as.hyper.data(), meta + kFixed + n_name, 8 * read_as.n_hyper);
  return read_as;
}

}  // namespace ringcomm::ps
