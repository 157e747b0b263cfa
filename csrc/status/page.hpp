// The status page: what one rank says of itself, in a memfd that the ranks of its node and their
// guardian map. Writing it costs no system call and works while a collective is stuck; it outlives
// its rank, so the last words of a killed process can still be read.
//
// Who writes: the rank itself (its Python code, its signal recorder, its on_exit handler, the thread of
// its heart), and the guardian the three fields that say so. `ringcomm ctl` writes the mailbox. Every other process only reads.
#pragma once
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../clock.hpp"
#include "../checked_enum_cast.hpp"
#include "lifeline.hpp"

namespace ringcomm {

// Its last digit is the version of the layout: `ringcomm top` looks at pages of other installations.
constexpr std::uint64_t kPageMagic = 0x72696e67636f6d35;  // "ringcom5"
constexpr std::uint64_t kPageMagicOfAnyVersion = kPageMagic & ~std::uint64_t{0xff};
constexpr std::size_t kScalars = 32, kEvents = 64, kArrivals = 256, kSteps = 128;
constexpr int kStepMarks = 5;  // of a training step; between them are its 4 phases

enum class State : std::uint32_t { starting = 0, running, leaving, left };
constexpr State last(State) { return State::left; }

enum class OpState : std::uint32_t { idle = 0, running, failed };
constexpr OpState last(OpState) { return OpState::failed; }

// How a rank ends. peer_failed is secondary: it says whom it blames.
enum class Ending : std::uint32_t {
  none = 0,
  exception,    // uncaught, in any thread
  sys_exit,     // sys.exit(n) with n != 0 that nobody caught
  os_exit,      // os._exit before shutdown()
  fatal_signal,  // SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT
  peer_failed,  // uncaught PeerFailedError
  interrupted,  // uncaught KeyboardInterrupt
  terminated,   // SIGTERM
  mpi_abort,    // MPI_Abort, which ends the other ranks, too
};
constexpr Ending last(Ending) { return Ending::mpi_abort; }

// Of the mailbox, in this order; the rank takes and answers, `ringcomm ctl` does the rest.
enum class Mail : std::uint32_t { free = 0, written, asked, taken, answered };

struct Page {
  std::uint64_t magic;
  std::uint64_t nonce;  // tells this page from that of a recycled pid
  char job[64];
  char host[64];
  std::int32_t pid, rank, size, local_rank;
  std::int32_t lifeline_fd;  // of the rank: a pipe whose other end the kernel closes when it dies
  std::atomic<State> state;
  std::atomic<std::uint64_t> step;

  struct Op {                           // guarded by a sequence lock: odd while being written
    std::atomic<std::uint32_t> version;
    std::atomic<OpState> state;
    std::uint64_t sequence, nbytes;
    std::int64_t start_ns;              // of monotonic_ns(), as all times here
    char name[128];
  } op;

  struct End {
    std::atomic<std::uint32_t> claimed;  // the first writer wins
    std::atomic<Ending> kind;            // stored last
    std::int64_t time_ns;
    std::int32_t code;                   // exit code, signal number, or the rank that is blamed
    std::int32_t is_by_parent;           // the signal came from what has started the rank
    char what[256];                      // "ValueError"
    char where[1024];                    // the lines of the report below the first
    char trace[8192];                    // the whole traceback, its tail if it is longer
  } end;

  // Of operations that are over: their number, their payload, and the time in which the page showed
  // one (it shows the oldest that is under way; one that is over at once is only counted).
  std::atomic<std::uint64_t> n_ended_ops, ended_nbytes;
  std::atomic<std::int64_t> busy_ns;

  // When this rank came to its last operations, and when they ended. Entry i % kArrivals is of the
  // i-th operation that the page showed; `turn` is i + 1 once it is whole.
  struct Arrival {
    std::atomic<std::uint64_t> turn;
    std::uint64_t sequence, nbytes;
    std::int64_t start_ns;
    std::atomic<std::int64_t> end_ns;  // 0: it is under way, or has failed
    char name[48];
  } arrivals[kArrivals];
  std::atomic<std::uint64_t> n_arrivals;

  // The latest value of each name of rc.log(), at most kScalars names.
  struct Scalar {
    std::atomic<std::uint32_t> version;  // odd while being written
    char name[48];
    std::int64_t step;                   // -1: none was given
    double value;
    std::int64_t time_ns;
  } scalars[kScalars];
  std::atomic<std::uint32_t> n_scalars;

  // What happened, in words; the entries are as those of arrivals.
  struct Event {
    std::atomic<std::uint64_t> turn;
    std::int64_t time_ns;
    char text[176];
  } events[kEvents];
  std::atomic<std::uint64_t> n_events;

  // Of a thread that needs neither Python nor MPI: it is late if the process is stopped, or its cores
  // are all taken.
  std::atomic<std::int64_t> heartbeat_ns;

  // One command at a time, and what became of it.
  struct Mailbox {
    std::atomic<std::int32_t> owner;      // pid of the `ringcomm ctl` that uses it, or 0
    std::atomic<Mail> mail;
    char command[256];
    char answer[512];                     // "ok ..." or "no ..."
  } mailbox;
  std::atomic<std::uint32_t> takes_commands;  // this rank has come to a step boundary
  std::atomic<std::uint32_t> is_paused;

  // Where a signal makes this process write its Python stacks; 0: nowhere. See status/stacks.py.
  std::atomic<std::int32_t> stacks_fd, stacks_signal;
  std::atomic<std::uint64_t> main_thread;

  char role[16];                         // "", "worker", "server" or "evaluator"

  // The latest training steps: when each phase began, the last mark being the end; and for how long
  // the thread was ready in each phase, but had no core. Entries are as those of arrivals.
  struct Step {
    std::atomic<std::uint64_t> turn;
    std::int64_t marks_ns[kStepMarks];
    std::int64_t no_core_ns[kStepMarks - 1];
  } steps[kSteps];
  std::atomic<std::uint64_t> n_steps;

  std::atomic<std::int64_t> leaving_ns;
  std::atomic<std::int32_t> exit_code;   // from exit(3); -1 until then
  std::atomic<std::int64_t> gone_ns;     // by the guardian: this process is no more
  std::atomic<std::uint32_t> is_guarded;   // by the guardian: it watches this rank
  std::atomic<std::uint32_t> is_reported;  // by the guardian: it has said who failed
};

struct OpView {
  OpState state = OpState::idle;
  std::uint64_t sequence = 0, nbytes = 0;
  std::int64_t start_ns = 0;
  std::string name;
};

struct ArrivalView {
  std::uint64_t sequence = 0, nbytes = 0;
  std::int64_t start_ns = 0, end_ns = 0;
  std::string name;
};

struct ScalarView {
  std::string name;
  std::int64_t step = 0, time_ns = 0;
  double value = 0;
};

struct EventView {
  std::int64_t time_ns = 0;
  std::string text;
};

struct StepView {
  std::uint64_t number = 0;  // of the steps of this rank, from 0
  std::int64_t marks_ns[kStepMarks], no_core_ns[kStepMarks - 1];
};

struct EndView {
  Ending kind = Ending::none;
  std::int64_t time_ns = 0;
  std::int32_t code = 0;
  bool is_by_parent = false;
  std::string what, where, trace;
};

// Maps a page. create() makes the memfd; open() takes the one of another process of this node, and
// adopt() a descriptor of it. All throw std::system_error; the others std::runtime_error, too, if it
// is not the page with this nonce.
class MappedPage {
 public:
  static MappedPage create(const std::string& job, const std::string& host, int rank, int size,
                           int local_rank, std::uint64_t nonce);
  static MappedPage open(int pid, int fd, std::uint64_t nonce);
  static MappedPage adopt(Descriptor fd, std::uint64_t nonce);
  // For readers without the nonce, who may not write: a page of this user. std::runtime_error also if
  // its layout is that of another version. They keep no descriptor: by one of the same number, a
  // guardian would take them for a fork of the rank.
  static MappedPage look(int pid, int fd);
  // As look(), for `ringcomm ctl`, which may write the mailbox.
  static MappedPage look_to_ask(int pid, int fd);

  MappedPage(MappedPage&& other) noexcept;
  MappedPage(const MappedPage&) = delete;
  MappedPage& operator=(const MappedPage&) = delete;
  MappedPage& operator=(MappedPage&&) = delete;
  ~MappedPage();

  // Returns a descriptor that hangs up when the rank `pid` dies: before its death can be seen, and
  // before a launcher that hears of it kills the others. Throws std::system_error.
  Descriptor open_lifeline(int pid) const;

  int fd() const { return fd_.get(); }
  void close_fd() { fd_.reset(); }  // the page stays mapped
  int lifeline_fd() const { return lifeline_.fd(); }  // of this process's own page
  Page* operator->() const { return page_; }
  Page* get() const { return page_; }

  void set_state(State state);
  void begin_op(const std::string& name, std::uint64_t sequence, std::uint64_t nbytes);
  void end_op(OpState state);
  void count_op(std::uint64_t nbytes);  // one that was over at once: the page has not shown it
  OpView op() const;

  // False if there are kScalars other names.
  bool log_scalar(const std::string& name, std::int64_t step, double value);
  std::vector<ScalarView> scalars() const;
  void note_event(const std::string& text);
  // Those that were not overwritten, the oldest first.
  std::vector<EventView> events() const;
  std::vector<ArrivalView> arrivals() const;

  // --- the mailbox. ctl: takes it, unless another live process has it; puts a command into it; takes
  // the command back, unless the rank has it; gives the mailbox back.
  bool take_mailbox(int pid);
  void put_command(const std::string& text);
  bool withdraw_command();
  void give_mailbox_back();
  Mail mail() const { return page_->mailbox.mail.load(); }
  std::string answer() const;
  // The rank: takes the command; "" if there is none.
  bool has_command() const { return mail() == Mail::asked; }
  std::string take_command();
  void answer_command(const std::string& text);

  void set_role(const std::string& role);
  void note_step(const StepView& step);
  std::vector<StepView> steps() const;

  // False if an earlier record stands.
  bool record_end(Ending kind, int code, const std::string& what, const std::string& where,
                  const std::string& trace);
  EndView end() const;

 private:
  static MappedPage found(int pid, int fd, bool writes);
  MappedPage(Page* page, Descriptor fd) : page_(page), fd_(std::move(fd)) {}
  Page* page_;
  Descriptor fd_;
  Lifeline lifeline_;
};

// Returns once the guardian has reported a failure, at the latest after timeout_ns, and at once where
// there is no guardian. A failing rank waits for it: when a rank ends, the launcher closes everybody's
// output.
void wait_for_report(const Page& page, std::int64_t timeout_ns);

// From now on a fatal signal (and SIGTERM where nobody handles it) and the exit code of this
// process are recorded in `page`, which must live as long as the process. Call once.
// The page also gets a heartbeat, while it is mapped.
void record_this_process(Page* page);

// The process of record_this_process() has left. Nothing if there is none.
void note_left();

// True of the handler by which it records signals.
bool is_recorder(const struct sigaction& action);

}  // namespace ringcomm
