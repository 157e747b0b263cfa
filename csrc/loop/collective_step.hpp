// One collective of a group: all members show what they bring, compare what they are about to do, and
// do it. In shared memory that is a NodeStep, between hosts a WireStep.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "program.hpp"

namespace ringcomm {

struct NodeReduction;
struct NodeCopy;

// A range of what another member shows, or of what this one does.
struct Pull {
  std::size_t member;
  std::size_t offset;
  std::size_t nbytes;
  std::byte* target;
};

// What a member brings: a few bytes that say what it shows, and how much that is.
struct Shown {
  std::string header;  // at most kInline bytes
  std::size_t nbytes;
};

class CollectiveStep : public Program {
 public:
  // Goes on with it for a while; returns true once it is over.
  virtual bool drive(std::int64_t limit_ns) = 0;

  // False if the fingerprints differ: nothing was touched. To be read once it is over.
  virtual bool agrees() const = 0;
  // False if all agree, but a member brings more than fits: no array was touched. As agrees().
  virtual bool is_whole() const { return true; }
  // False if the member is known not to have entered it.
  virtual bool has_arrived(std::size_t member) const = 0;
  // The member that had given the step up when this one wanted to go on.
  virtual std::optional<std::size_t> quitter() const { return {}; }
  virtual std::size_t size() const = 0;

  // Grows while messages of a long one complete; any thread may look.
  virtual std::uint64_t moves() const { return 0; }

  // All are here and agree, and this rank is to choose(): nothing goes on before. Also if the step is not
  // whole, as long as all headers are here: what is chosen is then not pulled.
  virtual bool is_to_choose() const { return false; }
  // By member; to be read while is_to_choose().
  virtual const std::vector<Shown>& shown() const { throw std::logic_error("nothing is to be chosen"); }
  // The thread that reads shown(), once. Pulls of more than is shown end the step with a fault.
  virtual void choose(std::vector<Pull>) { throw std::logic_error("nothing is to be chosen"); }
};

// Where the members of a group meet, step after step. A slot is for one step at a time.
class MeetingPlace {
 public:
  virtual ~MeetingPlace() = default;
  virtual std::size_t own_index() const = 0;
  virtual std::size_t n_members() const = 0;

  // Throw std::invalid_argument if there is no such slot.
  virtual std::shared_ptr<CollectiveStep> begin(std::size_t slot, std::uint64_t fingerprint,
                                                NodeReduction what) = 0;
  virtual std::shared_ptr<CollectiveStep> begin(std::size_t slot, std::uint64_t fingerprint,
                                                NodeCopy what) = 0;
};

}  // namespace ringcomm
