#include "mpi.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

#include "../clock.hpp"

namespace ringcomm {
namespace {

constexpr std::size_t kErrorTextMax = 8192;  // MPI_MAX_ERROR_STRING is 256 or 512 today

struct Status {
  alignas(16) unsigned char opaque[kMpiStatusMax];
};

// When a thread began the call of MPI in which it is; 0: it is in none.
struct Place {
  std::atomic<bool> is_taken{false};
  std::atomic<std::int64_t> since{0};
};
std::array<Place, 64> places;

// A thread's own place, while the thread lives.
class OwnPlace {
 public:
  OwnPlace() {
    for (Place& each : places)
      if (!each.is_taken.exchange(true)) {
        place_ = &each;
        return;
      }
  }
  OwnPlace(const OwnPlace&) = delete;
  OwnPlace& operator=(const OwnPlace&) = delete;
  ~OwnPlace() {
    if (place_ != &unseen_) place_->is_taken.store(false);
  }

  void enter() { place_->since.store(monotonic_ns(), std::memory_order_relaxed); }
  void leave() { place_->since.store(0, std::memory_order_relaxed); }

 private:
  Place unseen_;
  Place* place_ = &unseen_;
};

OwnPlace& own_place() {
  static thread_local OwnPlace place;
  return place;
}

// Calls a function of MPI.
template <class Function, class... Arguments>
int enter(Function function, Arguments... arguments) {
  OwnPlace& place = own_place();
  place.enter();
  const int code = function(arguments...);
  place.leave();
  return code;
}

// The functions of the library, typed for its kind of handle.
template <class Handle>
struct Functions {
  using Send = int (*)(const void*, int, Handle, int, int, Handle, Handle*);
  using Receive = int (*)(void*, int, Handle, int, int, Handle, Handle*);

  explicit Functions(const std::map<std::string, std::uintptr_t>& table) {
    find(table, "MPI_Isend", isend);
    find(table, "MPI_Irecv", irecv);
    find(table, "MPI_Send_init", send_init);
    find(table, "MPI_Recv_init", recv_init);
    find(table, "MPI_Start", start);
    find(table, "MPI_Test", test);
    find(table, "MPI_Cancel", cancel);
    find(table, "MPI_Request_free", request_free);
    find(table, "MPI_Get_count", get_count);
    find(table, "MPI_Error_string", error_string);
  }

  Send isend, send_init;
  Receive irecv, recv_init;
  int (*start)(Handle*);
  int (*test)(Handle*, int*, Status*);
  int (*cancel)(Handle*);
  int (*request_free)(Handle*);
  int (*get_count)(const Status*, Handle, int*);
  int (*error_string)(int, char*, int*);

 private:
  template <class Function>
  static void find(const std::map<std::string, std::uintptr_t>& table, const char* name,
                   Function& function) {
    const auto found = table.find(name);
    if (found == table.end() || found->second == 0)
      throw std::invalid_argument(std::string("the MPI library has no ") + name);
    function = reinterpret_cast<Function>(found->second);
  }
};

template <class Handle>
struct Library {
  Library(const MpiLibrary& library, Handle of_comm, Handle of_byte, std::size_t segment)
      : mpi(library.functions), comm(of_comm), byte(of_byte), segment_nbytes(segment) {}

  void check(int code) const {
    if (code == 0) return;  // MPI_SUCCESS, by the standard
    std::vector<char> text(kErrorTextMax, '\0');
    int length = 0;
    if (mpi.error_string(code, text.data(), &length) != 0) length = 0;
    throw WireFault(length > 0 ? std::string(text.data(), static_cast<std::size_t>(length))
                               : "MPI error " + std::to_string(code));
  }

  const Functions<Handle> mpi;
  const Handle comm, byte;
  const std::size_t segment_nbytes;
  std::atomic<bool> is_open{true};
};

// The first round is a plain one. Who begins a second will begin more: from then on the requests
// are persistent, so that the library looks up peer and protocol once.
template <class Handle>
class MpiMessage final : public Message {
 public:
  MpiMessage(std::shared_ptr<const Library<Handle>> library, std::byte* data, std::size_t nbytes,
             int peer, int tag, bool is_receive, bool is_exact)
      : library_(std::move(library)),
        peer_(peer),
        tag_(tag),
        is_receive_(is_receive),
        is_exact_(is_exact) {
    std::size_t start = 0;
    do {
      const std::size_t length = std::min(library_->segment_nbytes, nbytes - start);
      segments_.push_back({data + start, static_cast<int>(length), Handle{}, false});
      start += length;
    } while (start < nbytes);
    first_open_ = segments_.size();
  }

  ~MpiMessage() override {
    if (!is_persistent_ || !library_->is_open.load()) return;
    for (auto& segment : segments_)
      if (!segment.is_open) library_->mpi.request_free(&segment.request);
  }

  MpiMessage(const MpiMessage&) = delete;
  MpiMessage& operator=(const MpiMessage&) = delete;

  void start() override {
    if (first_open_ < segments_.size())
      throw WireFault("started again before its last round was complete");
    if (!library_->is_open.load()) throw WireFault("the wire is closed");
    const bool is_first = !has_been_started_;
    if (!is_first && !is_persistent_) become_persistent();
    has_been_started_ = true;
    first_open_ = received_nbytes_ = 0;
    for (auto& segment : segments_) {
      if (is_first)
        post(segment, library_->mpi.irecv, library_->mpi.isend);
      else
        library_->check(enter(library_->mpi.start, &segment.request));
      segment.is_open = true;
    }
  }

  bool test() override {
    for (; first_open_ < segments_.size(); ++first_open_) {
      Segment& segment = segments_[first_open_];
      int is_done = 0;
      Status status;
      library_->check(enter(library_->mpi.test, &segment.request, &is_done, &status));
      if (is_done == 0) return false;
      segment.is_open = false;
      if (is_receive_) take_in(status, segment);
    }
    return true;
  }

  std::size_t received_nbytes() const override { return received_nbytes_; }

  // MPI-4 gives up on cancelling sends, and they are matched or not all the same. Errors are
  // ignored: the request of a dead peer may refuse.
  void cancel() override {
    if (!is_receive_) return;
    for (auto& segment : segments_)
      if (segment.is_open) enter(library_->mpi.cancel, &segment.request);
  }

 private:
  struct Segment {
    std::byte* data;
    int nbytes;
    Handle request;
    bool is_open;  // a round of it is under way
  };

  void become_persistent() {
    for (auto& segment : segments_)
      post(segment, library_->mpi.recv_init, library_->mpi.send_init);
    is_persistent_ = true;
  }

  void post(Segment& segment, typename Functions<Handle>::Receive receive,
            typename Functions<Handle>::Send send) const {
    const Library<Handle>& lib = *library_;
    lib.check(is_receive_ ? enter(receive, segment.data, segment.nbytes, lib.byte, peer_, tag_,
                                  lib.comm, &segment.request)
                          : enter(send, segment.data, segment.nbytes, lib.byte, peer_, tag_,
                                  lib.comm, &segment.request));
  }

  void take_in(const Status& status, const Segment& segment) {
    int nbytes = 0;
    library_->check(library_->mpi.get_count(&status, library_->byte, &nbytes));
    received_nbytes_ += static_cast<std::size_t>(nbytes);
    if (is_exact_ && nbytes != segment.nbytes)
      throw WireFault("a message came " + std::to_string(segment.nbytes - nbytes) +
                      " bytes short");
  }

  const std::shared_ptr<const Library<Handle>> library_;
  const int peer_, tag_;
  const bool is_receive_, is_exact_;
  std::vector<Segment> segments_;
  std::size_t received_nbytes_ = 0;
  std::size_t first_open_;  // segments before it are complete
  bool has_been_started_ = false;
  bool is_persistent_ = false;
};

template <class Handle>
class MpiWire final : public Wire {
 public:
  explicit MpiWire(std::shared_ptr<Library<Handle>> library) : library_(std::move(library)) {}

  std::unique_ptr<Message> send(const std::byte* data, std::size_t nbytes, int dest,
                                int tag) override {
    return make(const_cast<std::byte*>(data), nbytes, dest, tag, false);  // MPI only reads it
  }
  std::unique_ptr<Message> receive(std::byte* out, std::size_t nbytes, int source,
                                   int tag) override {
    return make(out, nbytes, source, tag, true);
  }
  std::unique_ptr<Message> receive_at_most(std::byte* out, std::size_t nbytes, int source,
                                           int tag) override {
    if (nbytes > library_->segment_nbytes)
      throw std::invalid_argument("a message whose size is not known has one segment");
    return make(out, nbytes, source, tag, true, false);
  }
  void close() override { library_->is_open.store(false); }

 private:
  std::unique_ptr<Message> make(std::byte* data, std::size_t nbytes, int peer, int tag,
                                bool is_receive, bool is_exact = true) {
    return std::make_unique<MpiMessage<Handle>>(library_, data, nbytes, peer, tag, is_receive, is_exact);
  }

  const std::shared_ptr<Library<Handle>> library_;
};

template <class Handle>
std::shared_ptr<Wire> make(const MpiLibrary& library, Handle comm, Handle byte,
                           std::size_t segment_nbytes) {
  return std::make_shared<MpiWire<Handle>>(
      std::make_shared<Library<Handle>>(library, comm, byte, segment_nbytes));
}

}  // namespace

std::int64_t in_mpi_since() {
  std::int64_t first = 0;
  for (const Place& each : places) {
    const std::int64_t since = each.since.load(std::memory_order_relaxed);
    if (since != 0 && (first == 0 || since < first)) first = since;
  }
  return first;
}

std::shared_ptr<Wire> make_mpi_wire(const MpiLibrary& library, std::uint64_t comm,
                                    std::size_t segment_nbytes) {
  if (segment_nbytes == 0 || segment_nbytes > (std::size_t{1} << 30))
    throw std::invalid_argument("segments have 1 byte to 1 GiB");
  if (library.handle_nbytes == sizeof(int))
    return make(library, static_cast<int>(comm), static_cast<int>(library.byte), segment_nbytes);
  if (library.handle_nbytes == sizeof(void*))
    return make(library, reinterpret_cast<void*>(comm), reinterpret_cast<void*>(library.byte),
                segment_nbytes);
  throw std::invalid_argument("MPI handles of " + std::to_string(library.handle_nbytes) +
                              " bytes are not known");
}

}  // namespace ringcomm
