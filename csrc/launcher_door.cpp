// A library that `ringcomm run` preloads into prterun, and into prted on the other hosts of a job: they let in
// nobody of their host but their own user, and root.
//
// They believe who a connection says it is: over TCP, PMIx 5 checks the user id that the other side sends.
// Any process of the host that reaches a port of theirs can have them start programs, and end the job
// (measured with Open MPI 5.0.11). The kernel knows who has opened a connection within a host; so that of
// somebody else is closed before they have read a byte. Those of other hosts come in: daemons of the job do.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

constexpr char kPreload[] = "LD_PRELOAD";
constexpr char kOwnName[] = "/ringcomm-launcher-door.so";
constexpr unsigned char kEstablished = 1;  // of include/net/tcp_states.h

enum class Answer { own, foreign, unknown };

struct End {
  unsigned char address[16];
  in_port_t port;
};

// IPv4 in IPv6 counts as IPv4: so the kernel has the other side of it, which asked by IPv4.
bool read_end(const sockaddr_storage& from, int& family, End& end) {
  std::memset(&end, 0, sizeof end);
  if (from.ss_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(from);
    family = AF_INET;
    std::memcpy(end.address, &in.sin_addr, 4);
    end.port = in.sin_port;
    return true;
  }
  if (from.ss_family != AF_INET6) return false;
  const auto& in = reinterpret_cast<const sockaddr_in6&>(from);
  const bool is_mapped = IN6_IS_ADDR_V4MAPPED(&in.sin6_addr);
  family = is_mapped ? AF_INET : AF_INET6;
  std::memcpy(end.address, in.sin6_addr.s6_addr + (is_mapped ? 12 : 0), is_mapped ? 4 : 16);
  end.port = in.sin6_port;
  return true;
}

bool is_of_this_host(int family, const End& theirs, const End& ours) {
  static constexpr unsigned char kOwn[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  if (std::memcmp(theirs.address, ours.address, sizeof ours.address) == 0) return true;
  return family == AF_INET ? theirs.address[0] == 127 : std::memcmp(theirs.address, kOwn, sizeof kOwn) == 0;
}

// Asks the kernel for the socket at the other side of a connection, and whose it is.
Answer owner_of(int family, const End& theirs, const End& ours) {
  const int fd = socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
  if (fd < 0) return Answer::unknown;
  const timeval limit{1, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  struct {
    nlmsghdr head;
    inet_diag_req_v2 body;
  } question{};
  question.head.nlmsg_len = sizeof question;
  question.head.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  question.head.nlmsg_flags = NLM_F_REQUEST;
  question.body.sdiag_family = static_cast<__u8>(family);
  question.body.sdiag_protocol = IPPROTO_TCP;
  question.body.idiag_states = ~0u;
  question.body.id.idiag_sport = theirs.port;
  question.body.id.idiag_dport = ours.port;
  std::memcpy(question.body.id.idiag_src, theirs.address, sizeof theirs.address);
  std::memcpy(question.body.id.idiag_dst, ours.address, sizeof ours.address);
  question.body.id.idiag_cookie[0] = question.body.id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;
  alignas(nlmsghdr) char reply[4096];
  Answer answer = Answer::unknown;
  ssize_t n = -1;
  if (send(fd, &question, sizeof question, 0) == static_cast<ssize_t>(sizeof question))
    n = recv(fd, reply, sizeof reply, 0);
  close(fd);
  const auto* head = reinterpret_cast<const nlmsghdr*>(reply);
  if (n < static_cast<ssize_t>(sizeof(nlmsghdr)) || head->nlmsg_len > static_cast<std::size_t>(n)) return answer;
  if (head->nlmsg_type == NLMSG_ERROR && head->nlmsg_len >= NLMSG_LENGTH(sizeof(nlmsgerr))) {
    const auto* error = static_cast<const nlmsgerr*>(NLMSG_DATA(head));
    // Of another host; or of this one, and gone.
    answer = error->error == -ENOENT && is_of_this_host(family, theirs, ours) ? Answer::foreign : Answer::unknown;
  } else if (head->nlmsg_type == SOCK_DIAG_BY_FAMILY && head->nlmsg_len >= NLMSG_LENGTH(sizeof(inet_diag_msg))) {
    const auto* found = static_cast<const inet_diag_msg*>(NLMSG_DATA(head));
    const bool is_ours = found->idiag_uid == geteuid() || found->idiag_uid == 0;
    // The kernel says 0 of what its owner has closed.
    answer = is_ours && found->idiag_state == kEstablished ? Answer::own : Answer::foreign;
  }
  return answer;
}

Answer judge(int fd) {
  sockaddr_storage here{}, there{};
  socklen_t here_size = sizeof here, there_size = sizeof there;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&here), &here_size) != 0) return Answer::unknown;
  if (here.ss_family != AF_INET && here.ss_family != AF_INET6) return Answer::own;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&there), &there_size) != 0) return Answer::foreign;
  int family = 0;
  End ours, theirs;
  if (!read_end(here, family, ours) || !read_end(there, family, theirs)) return Answer::unknown;
  return owner_of(family, theirs, ours);
}

bool is_launcher() {
  static const bool is_so = [] {
    char name[32] = "";
    std::FILE* file = std::fopen("/proc/self/comm", "re");
    if (file == nullptr) return false;
    const bool has_name = std::fgets(name, sizeof name, file) != nullptr;
    std::fclose(file);
    return has_name && (std::strcmp(name, "prterun\n") == 0 || std::strcmp(name, "prted\n") == 0);
  }();
  return is_so;
}

// What the launcher starts, such as ssh and ranks, is not to have it. It is the last one: see launcher_door.py.
[[gnu::constructor]] void take_back_preload() {
  const char* const preload = is_launcher() ? std::getenv(kPreload) : nullptr;
  if (preload == nullptr) return;
  std::string left = preload;
  const auto colon = left.rfind(':');
  if (left.find(kOwnName, colon == std::string::npos ? 0 : colon) == std::string::npos) return;
  if (colon == std::string::npos) {
    unsetenv(kPreload);
  } else {
    left.resize(colon);
    setenv(kPreload, left.c_str(), 1);
  }
}

// Without an answer, as in a sandbox that has no netlink, all may come in, as before.
int let_in(int fd) {
  if (fd < 0 || !is_launcher()) return fd;
  const int error = errno;
  if (judge(fd) == Answer::foreign) {
    close(fd);
    errno = EAGAIN;  // to all callers, as if nobody had come
    return -1;
  }
  errno = error;
  return fd;
}

template <class Function>
Function* original(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" int accept(int fd, sockaddr* address, socklen_t* size) {
  static auto* const next = original<int(int, sockaddr*, socklen_t*)>("accept");
  return let_in(next(fd, address, size));
}

extern "C" int accept4(int fd, sockaddr* address, socklen_t* size, int flags) {
  static auto* const next = original<int(int, sockaddr*, socklen_t*, int)>("accept4");
  return let_in(next(fd, address, size, flags));
}
