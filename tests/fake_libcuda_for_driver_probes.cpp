// A libcuda.so.1 for tests of ci/gpu_suite/driver_probes.py. A stream is a thread, GPU memory is a file
// that other processes map. FAKE_BLOCKS=1: freeing memory waits for all streams, as CUDA may.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>

using Address = uint64_t;
constexpr int kInvalidValue = 1, kNotReady = 600;

struct Stream {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> work;
    std::thread thread{[this] { run(); }};

    void run() {
        for (;;) {
            std::function<void()> next;
            {
                std::unique_lock lock(mutex);
                changed.wait(lock, [this] { return !work.empty(); });
                next = work.front();
            }
            next();
            std::lock_guard lock(mutex);
            work.pop_front();
            changed.notify_all();
        }
    }
    int add(std::function<void()> next) {
        std::lock_guard lock(mutex);
        work.push_back(std::move(next));
        changed.notify_all();
        return 0;
    }
    bool idle() {
        std::lock_guard lock(mutex);
        return work.empty();
    }
    int wait() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return work.empty(); });
        return 0;
    }
};
struct Event {
    bool reached = true;
};
// CUstreamBatchMemOpParams of cuda.h, without the operations on 64 bits
union BatchMemOp {
    int operation;
    struct {
        int operation;
        Address address;
        union {
            uint32_t value;
            uint64_t value64;
        };
        unsigned flags;
        Address alias;
    } on_value;
    uint64_t pad[6];
};
struct Handle {
    char raw[64];
};

static std::mutex everything;
static std::set<Stream*> streams;

static int map_file(Address* out, const char* path, size_t nbytes, int flags) {
    const int fd = open(path, O_RDWR | flags, 0600);
    if (fd < 0) return kInvalidValue;
    if (flags != 0 && ftruncate(fd, static_cast<off_t>(nbytes)) != 0) return kInvalidValue;
    void* at = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    *out = reinterpret_cast<Address>(at);
    return 0;
}
static std::string path_of(long pid, Address at) {
    return std::string(getenv("FAKE_GPU")) + "/" + std::to_string(pid) + "." + std::to_string(at);
}
static volatile uint32_t* word(Address at) { return reinterpret_cast<volatile uint32_t*>(at); }

extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGetCount(int* n) { return *n = 1, 0; }
int cuDeviceGet(int* device, int) { return *device = 0, 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = &everything, 0; }
int cuCtxSetCurrent(void* context) { return context == &everything ? 0 : kInvalidValue; }
int cuGetErrorName(int, const char** name) { return *name = "CUDA_ERROR_OF_A_FAKE", 0; }
int cuCtxSynchronize() {
    std::lock_guard lock(everything);
    for (Stream* each : streams) each->wait();
    return 0;
}
int cuMemAlloc_v2(Address* out, size_t nbytes) {
    static int serial = 0;
    std::lock_guard lock(everything);
    const std::string fresh = path_of(getpid(), static_cast<Address>(serial++)) + ".new";
    if (map_file(out, fresh.c_str(), nbytes, O_CREAT) != 0) return kInvalidValue;
    return rename(fresh.c_str(), path_of(getpid(), *out).c_str());
}
int cuMemFree_v2(Address) { return getenv("FAKE_BLOCKS") ? cuCtxSynchronize() : 0; }
int cuMemsetD32_v2(Address at, uint32_t value, size_t n) {
    for (size_t i = 0; i < n; ++i) word(at)[i] = value;
    return 0;
}
int cuMemsetD32Async(Address at, uint32_t value, size_t n, Stream* stream) {
    return stream->add([=] { cuMemsetD32_v2(at, value, n); });
}
int cuMemcpyDtoH_v2(void* to, Address at, size_t nbytes) {
    return std::memcpy(to, reinterpret_cast<void*>(at), nbytes), 0;
}
int cuMemHostRegister_v2(void*, size_t, unsigned flags) { return flags == 3 ? 0 : kInvalidValue; }
int cuMemHostUnregister(void*) { return 0; }
int cuMemHostGetDevicePointer_v2(Address* out, void* at, unsigned) {
    return *out = reinterpret_cast<Address>(at), 0;
}
int cuStreamCreate(Stream** out, unsigned) {
    std::lock_guard lock(everything);
    return streams.insert(*out = new Stream), 0;
}
int cuStreamDestroy_v2(Stream*) { return 0; }
int cuStreamQuery(Stream* stream) { return stream->idle() ? 0 : kNotReady; }
int cuStreamSynchronize(Stream* stream) { return stream->wait(); }
int cuStreamWriteValue32_v2(Stream* stream, Address at, uint32_t value, unsigned) {
    return stream->add([=] { *word(at) = value; });
}
int cuStreamWaitValue32_v2(Stream* stream, Address at, uint32_t value, unsigned) {
    return stream->add([=] {
        while (static_cast<int32_t>(*word(at) - value) < 0) usleep(20);
    });
}
int cuStreamBatchMemOp_v2(Stream* stream, unsigned count, BatchMemOp* each, unsigned flags) {
    if (flags != 0 || count > 255) return kInvalidValue;
    for (const auto* op = each; op != each + count; ++op) {
        const bool is_wait = op->operation == 1;
        if (!is_wait && op->operation != 2) return kInvalidValue;
        (is_wait ? cuStreamWaitValue32_v2 : cuStreamWriteValue32_v2)(
            stream, op->on_value.address, op->on_value.value, op->on_value.flags);
    }
    return 0;
}
int cuDeviceGetUuid_v2(char*, int) { return 0; }
int cuStreamIsCapturing(Stream*, int* is_capturing) { return *is_capturing = 0, 0; }
int cuThreadExchangeStreamCaptureMode(int*) { return 0; }
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuCtxPopCurrent_v2(void**) { return 0; }
// The kernel WRITE of kernels.cu, whose parameters are in one buffer.
int launch_write(Stream* stream, void** extra) {
    struct { Address target; uint32_t value; } parameters{};
    const auto tag = [&](int at) { return reinterpret_cast<uintptr_t>(extra[at]); };
    if (!extra || tag(0) != 1 || tag(2) != 2 || tag(4) != 0) return kInvalidValue;
    if (*static_cast<size_t*>(extra[3]) != 12) return kInvalidValue;
    std::memcpy(&parameters, extra[1], 12);
    return stream->add([=] { *word(parameters.target) = parameters.value; });
}
int cuEventCreate(Event** out, unsigned) { return *out = new Event, 0; }
int cuEventDestroy_v2(Event*) { return 0; }
int cuEventRecord(Event* event, Stream* stream) {
    event->reached = false;
    return stream->add([=] { event->reached = true; });
}
int cuEventQuery(Event* event) { return event->reached ? 0 : kNotReady; }
int cuModuleLoadData(void** out, const char* text) {
    const bool is_known = std::strstr(text, ".entry nothing") || std::strstr(text, "rc_entry");
    return *out = &everything, is_known ? 0 : kInvalidValue;
}
int cuModuleGetFunction(void** out, void*, const char* name) {
    *out = std::strcmp(name, "nothing") ? static_cast<void*>(&everything) : &streams;
    return *out == &streams || !std::strcmp(name, "rc_entry") ? 0 : kInvalidValue;
}
int cuLaunchKernel(void* function, unsigned x, unsigned, unsigned, unsigned, unsigned, unsigned,
                   unsigned shared, Stream* stream, void** arguments, void** extra) {
    if (x != 1 || shared || arguments) return kInvalidValue;
    if (function == &streams) return extra ? kInvalidValue : stream->add([] {});
    return launch_write(stream, extra);
}
int cuIpcGetMemHandle(Handle* out, Address at) {
    std::memset(out, 0, sizeof *out);
    std::snprintf(out->raw, sizeof out->raw, "%ld.%lu", static_cast<long>(getpid()), at);
    return 0;
}
int cuIpcOpenMemHandle_v2(Address* out, Handle handle, unsigned) {
    const std::string path = std::string(getenv("FAKE_GPU")) + "/" + handle.raw;
    return map_file(out, path.c_str(), 1 << 21, 0);
}
int cuIpcCloseMemHandle(Address) { return 0; }
}
