// The pushes of a home that take no Python, of which another process has a copy: the follower carries
// each out first, the primary last. ringcomm/ps/server/homes/replication.py has the protocol.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>

namespace ringcomm::ps {

// What one copy knows. Of its changes, those that Python carries out have numbers, too.
class HomePushes {
 public:
  explicit HomePushes(std::uint32_t number) : number_(number) {}

  std::uint32_t number() const { return number_; }
  void lead(std::optional<std::uint32_t> follower) {
    is_primary_ = true;
    follower_ = follower;
    primary_.reset();
  }
  void follow(std::uint32_t primary) { primary_ = primary; }
  bool is_primary() const { return is_primary_; }
  const std::optional<std::uint32_t>& follower() const { return follower_; }
  bool follows(std::uint32_t rank) const { return primary_ == rank; }

  // The number of the next change. Of a follower: not known.
  std::uint64_t next() { return ++last_; }
  std::uint64_t last() const { return last_; }

  // Python keeps changes or reads, or copies the home: pushes are to go behind that.
  bool is_kept = false;

  // The frame of a push that the follower has been sent.
  struct Push {
    std::uint64_t number;
    std::uint32_t source;
    std::string frame;
  };
  void keep(std::uint64_t number, std::uint32_t source, std::string frame) {
    pushes_.push_back({number, source, std::move(frame)});
  }
  std::size_t n_under_way() const { return pushes_.size(); }
  // The oldest, if the follower has done all changes up to `number`.
  std::optional<Push> take(std::uint64_t number) {
    if (pushes_.empty() || pushes_.front().number > number) return std::nullopt;
    std::optional<Push> push(std::move(pushes_.front()));
    pushes_.pop_front();
    return push;
  }

  // Of a follower: the last push that it has carried out, and not reported yet; 0: there is none.
  std::uint64_t unreported = 0;
  // That were carried out.
  void count(std::uint64_t nbytes) {
    ++n_requests_;
    n_body_ += nbytes;
  }
  std::uint64_t n_requests() const { return n_requests_; }
  std::uint64_t n_body() const { return n_body_; }

 private:
  const std::uint32_t number_;
  bool is_primary_ = false;
  std::optional<std::uint32_t> follower_, primary_;
  std::uint64_t last_ = 0, n_requests_ = 0, n_body_ = 0;
  std::deque<Push> pushes_;
};

}  // namespace ringcomm::ps
