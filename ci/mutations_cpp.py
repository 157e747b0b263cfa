"""The faults that ci/mutants plants in C++: mistakes of order, of places and of memory.

Each compiles, imports and sums two float32 arrays over two ranks. Some show in a race alone: the
tests and stress runs named for them make it likely enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mutations import Mutation

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class CppMutation(Mutation):
    """One fault; `file` is a folder of csrc/, for what is where within it may change.

    Attributes:
        stress: programs of csrc/stress that may catch it, each with its arguments.
    """

    stress: tuple[tuple[str, ...], ...] = ()

    def planted(self, root: Path) -> tuple[Path, str]:
        """Return the file to change and its faulty text.

        Raises:
            ValueError: `old` does not occur exactly once in the folder.
        """
        files = sorted((root / "csrc" / self.file).glob("*.[ch]pp"))
        found = {path: n for path in files if (n := path.read_text().count(self.old))}
        if list(found.values()) != [1]:
            places = {path.name: n for path, n in found.items()} or "nowhere"
            raise ValueError(f"{self.name}: its text occurs in csrc/{self.file}: {places}")
        (path,) = found
        return path, path.read_text().replace(self.old, self.new)


CPP_MUTATIONS = [
    # --- the node engine ------------------------------------------------------------------------
    CppMutation(
        "who-gave-up-is-not-looked-for",
        "node",
        "shm",
        "    if (has_given_up(member)) {",
        "    if (false) {",
        "a rank that comes late adds the array of one that gave up, and overwrites it",
        ("unit/test_giving_up.py",),
        stress=(("abandon", "100"),),
    ),
    CppMutation(
        "a-rank-gives-up-in-silence",
        "node",
        "shm",
        'if (!is_over()) fail("this rank has given it up");',
        'if (!is_over()) end("this rank has given it up");',
        "a rank that gave an operation up counts as one that takes part",
        ("unit/test_giving_up.py",),
        stress=(("abandon", "100"),),
    ),
    CppMutation(
        "a-dropped-step-counts",
        "node",
        "shm",
        "memory().is_of_this_process()) give_up();",
        "memory().is_of_this_process()) return;",
        "a rank that has dropped an operation counts as one that takes part",
        ("unit/test_giving_up.py",),
        stress=(("abandon", "100"),),
    ),
    CppMutation(
        "who-gives-up-waits-for-nobody",
        "node",
        "shm",
        "  meeting_.team->await_untouched(slot(), seq_, monotonic_ns() + kStuckNs);",
        "  ;",
        "a rank writes the array of one that has given up, and uses it again",
        ("unit/test_giving_up.py",),
        stress=(("abandon", "100"),),
    ),
    CppMutation(
        "cores-hold-all-arenas",
        "fault",
        "shm",
        "  keep_out_of_core_dumps(at, nbytes);",
        "  ;",
        "the core of one rank takes as much memory as the node has, for each of its ranks",
        ("unit/test_node.py",),
    ),
    CppMutation(
        "a-good-rank-s-children-end-with-the-job",
        "fault",
        "status",
        "if (w.is_gone && (w.is_reported || !ended_well(w.facts())))",
        "if (w.is_gone)",
        "what a rank has left behind on purpose is ended because another one failed",
        ("unit/test_orphans.py",),
    ),
    CppMutation(
        "copy-returns-before-all-have-read",
        "node",
        "shm",
        "if (kind_ == Source::registered && !all_at(&StepProgress::done, kAllDone))",
        "if (kind_ == Source::staged && !all_at(&StepProgress::done, kAllDone))",
        "who broadcasts a registered array and changes it sends what it has become",
        ("unit/test_node_memory.py",),
    ),
    CppMutation(
        "reduction-returns-before-all-have-read",
        "node",
        "shm",
        "const bool is_read = is_registered_ && !step_.is_due(step_.index());",
        "const bool is_read = is_registered_ && step_.is_due(step_.index());",
        "who gives to a reduction a registered array and changes it adds what it has become",
        ("unit/test_node_memory.py",),
    ),
    CppMutation(
        "slices-return-before-all-have-read",
        "node",
        "shm",
        "if (!step_.all_at(&StepProgress::done, kAllDone)) return Step::waiting;",
        "if (step_.size() == 1) return Step::waiting;",
        "who gives a registered array to reduce_scatter and changes it adds what it has become",
        ("unit/test_node_memory.py",),
    ),
    CppMutation(
        "lane-place-again-too-early",
        "node",
        "shm",
        "!step_.all_at(&StepProgress::done, n_copied_ - n_places() + 1))",
        "!step_.all_at(&StepProgress::done, n_copied_ - n_places()))",
        "a place of a lane is written again while another rank still reads it",
        ("unit/test_node.py", "unit/test_node_memory.py"),
        stress=(("node", "600"),),
    ),
    CppMutation(
        "lane-again-too-early",
        "node",
        "shm",
        "if (!all_at(lane->slot, &StepProgress::done, lane->until)) continue;",
        "if (lane->slot == kSlots) continue;",
        "the next operation writes into a lane that others still read",
        ("unit/test_node_memory.py", "unit/test_node.py"),
        stress=(("node", "600"),),
    ),
    CppMutation(
        "lane-short-by-its-skew",
        "node",
        "shm",
        "allocator().take(kLane + kSkew)",
        "allocator().take(kLane)",
        "the end of a lane lies in somebody's array",
        ("unit/test_node_memory.py",),
    ),
    CppMutation(
        "one-place-of-a-lane",
        "node",
        "shm",
        "const std::size_t at = number % n_places();",
        "const std::size_t at = number % 1;",
        "segments of a reduction overwrite each other",
        ("unit/test_node.py",),
    ),
    CppMutation(
        "one-place-of-a-copy",
        "node",
        "shm",
        "std::memcpy(lane_of(index()) + n_shown_ % n_places * kSegment,",
        "std::memcpy(lane_of(index()) + n_shown_ % 2 * kSegment,",
        "segments of a broadcast come from the wrong place",
        ("unit/test_node.py",),
    ),
    CppMutation(
        "pieces-of-the-first-slice",
        "node",
        "shm",
        "const std::size_t from = begin + (before - step_.at(0)) * kPiece;",
        "const std::size_t from = begin + (before - step_.at(0)) / 2 * 2 * kPiece;",
        "every other piece of a registered array is not reduced",
        ("unit/test_node.py",),
    ),
    CppMutation(
        "trim-takes-the-neighbours-page",
        "node",
        "shm",
        "const std::size_t begin = rounded_up(offset, page_nbytes_);",
        "const std::size_t begin = offset / page_nbytes_ * page_nbytes_;",
        "small arrays become zeros when a large one is given back",
        ("unit/test_node_memory.py",),
    ),
    CppMutation(
        "sleeper-is-not-seen",
        "node",
        "shm",
        "mine.store(value, std::memory_order_seq_cst);",
        "mine.store(value, std::memory_order_release);",
        "now and then a rank sleeps on although all others are there",
        (),
        stress=(("bell", "1000000"),),
    ),
    CppMutation(
        "a-trim-goes-by-small-pages",
        "node",
        "shm",
        "(offset + block.nbytes) / page_nbytes_ * page_nbytes_",
        "(offset + block.nbytes) / kUnit * kUnit",
        "with pages of 64 KiB, memory that is given back takes a neighbour's with it",
        ("unit/test_pages.py",),
    ),
    # --- the ends of ranks ----------------------------------------------------------------------
    CppMutation(
        "a-fork-closes-the-lifeline-again",
        "fault",
        "status",
        "if (const int taken = held[place].exchange(0); taken != 0)",
        "if (const int taken = held[place].load(); taken != 0)",
        "a DataLoader worker closes a file of its own under its feet",
        ("unit/test_descriptors.py",),
    ),
    CppMutation(
        "a-signal-ends-the-watch-on-deaths",
        "fault",
        "loop",
        "if (errno != EINTR) usleep(kUnheardMs * 1000);",
        "return;",
        "a rank that waits in C++ hears of no death any more",
        ("unit/test_descriptors.py",),
    ),
    # --- the loop, and messages without Python --------------------------------------------------
    CppMutation(
        "scratch-is-freed-after-a-failure",
        "wire",
        "loop",
        "  workspace_->cancel_receives();\n  bury(std::move(workspace_));",
        "  workspace_->cancel_receives();\n  workspace_.reset();",
        "messages that are still under way are written into memory that is another's",
        ("unit/test_recording.py", "unit/test_mpi_wire.py"),
    ),
    CppMutation(
        "requests-of-other-arguments",
        "wire",
        "loop",
        "return tag == other.tag && arguments == other.arguments && members == other.members;",
        "return tag == other.tag && members == other.members;",
        "an operation that comes again with another array sends the one before",
        ("unit/test_mpi_wire.py", "unit/test_recording.py"),
    ),
    CppMutation(
        "idle-memory-counts-twice",
        "wire",
        "loop",
        "  idle_.erase(best);\n  idle_nbytes_ -= found->nbytes();",
        "  idle_.erase(best);\n  idle_nbytes_ += found->nbytes();",
        "what idle operations keep is counted wrongly, and thrown away ever again",
        ("unit/test_recording.py",),
    ),
    CppMutation(
        "fork-frees-what-a-thread-holds",
        "wire",
        "loop",
        "if (getpid() == pid_) delete has_work_;",
        "delete has_work_;",
        "a DataLoader's worker hangs at its end",
        ("unit/test_node.py::test_a_fork_lets_go_of_what_a_thread_of_its_parent_drives",),
    ),
    CppMutation(
        "segments-of-a-message-begin-alike",
        "wire",
        "wire",
        "segments_.push_back({data + start, static_cast<int>(length), Handle{}, false});",
        "segments_.push_back({data, static_cast<int>(length), Handle{}, false});",
        "of a message beyond 1 GiB the first part comes again and again",
        ("unit/test_mpi_wire.py",),
    ),
    CppMutation(
        "tags-of-others-fit",
        "wire",
        "wire",
        "return tag_ == receive.tag_ && (receive.peer_ == rank_ || receive.peer_ == kAnySource);",
        "return receive.peer_ == rank_ || receive.peer_ == kAnySource;",
        "ranks as threads take each other's messages",
        ("unit/test_transport.py",),
    ),
    CppMutation(
        "a-withdrawn-send-stays",
        "wire",
        "wire",
        "  (message.is_receive_ ? room.receives : room.sends).remove(&message);",
        "  if (message.is_receive_) room.receives.remove(&message);",
        "a message that was dropped is sent all the same, from memory that is another's",
        ("unit/test_transport.py",),
    ),
    # --- kernels, and what crosses into C++ ----------------------------------------------------
    CppMutation(
        "a-code-too-far",
        "dtype",
        ".",
        "static_cast<std::size_t>(code) >= n_codes<E>",
        "static_cast<std::size_t>(code) > n_codes<E>",
        "a dtype that has no kernel calls what lies behind the table",
        (
            "unit/test_kernels.py",
            "unit/test_status.py",
        ),
    ),
    CppMutation(
        "random-numbers-come-again",
        "dtype",
        "kernels",
        "random_run(random, stream, at / kPiece)",
        "random_run(random, stream, 0)",
        "int8 rounds elements that lie apart alike: the mean of a gradient is biased",
        ("unit/test_codec.py",),
    ),
    CppMutation(
        "all-that-are-equal",
        "dtype",
        "kernels",
        "n_equal-- > 0",
        "n_equal > 0",
        "top_k writes beyond its indices where magnitudes are equal",
        ("unit/test_codec.py",),
    ),
    CppMutation(
        "rounded-twice",
        "dtype",
        "kernels",
        "  bits |= back != value ? 1u : 0u;\n",
        "",
        "float64 becomes a 16-bit float that is not the nearest",
        (
            "unit/test_codec.py",
            "unit/test_kernels.py",
        ),
    ),
    CppMutation(
        "mpi-messages-come-short",
        "wire",
        "wire",
        "if (is_receive_) require_whole(status, segment);",
        "(void)status;",
        "a message that is too short leaves the rest of the array as it was",
        ("unit/test_mpi_wire.py",),
    ),
    CppMutation(
        "requests-are-kept",
        "wire",
        "wire",
        "if (!segment.is_open) library_->mpi.request_free(&segment.request);",
        "if (segment.is_open) library_->mpi.request_free(&segment.request);",
        "each named operation leaves its requests behind in MPI",
        ("unit/test_mpi_wire.py",),
    ),
    CppMutation(
        "idle-messages-without-limit",
        "wire",
        "loop",
        "(is_closed_ || idle_.size() > kIdleMax || idle_nbytes_ > kIdleNbytesMax)",
        "(is_closed_ || idle_nbytes_ > kIdleNbytesMax * 64)",
        "what idle operations keep grows without limit",
        ("unit/test_recording.py",),
    ),
    CppMutation(
        "the-last-record-stands",
        "fault",
        "status",
        "if (!claim(end)) return false;",
        "claim(end);",
        "what follows from a failure is reported instead of it",
        ("unit/test_status.py",),
    ),
    CppMutation(
        "a-traceback-loses-its-end",
        "fault",
        "status",
        "store_tail(end.trace, trace);",
        "store_text(end.trace, trace);",
        "of a long traceback the error itself is missing",
        ("unit/test_status.py",),
    ),
    CppMutation(
        "leaving-has-no-time",
        "fault",
        "status",
        "if (state == State::leaving) page_->leaving_ns.store(monotonic_ns());",
        "(void)monotonic_ns;",
        "who left while the others waited is not the one that is blamed",
        ("unit/test_status.py",),
    ),
    CppMutation(
        "ranges-begin-with-segments",
        "node",
        "shm",
        "std::memcpy(each.target + (from - each.offset), shown",
        "std::memcpy(each.target + (from - begin), shown",
        "the segments of a long private array all arrive at its beginning",
        ("unit/test_node_memory.py",),
    ),
    # --- parameter servers ----------------------------------------------------------------------
    CppMutation(
        "torn-values-are-read",
        "ps",
        "ps",
        "if (header.begun.load(std::memory_order_relaxed) < version + 2)",
        "if (header.begun.load(std::memory_order_relaxed) < version + 3)",
        "a pull has some values of one update and some of the next",
        ("unit/test_ps_blocks.py",),
    ),
    CppMutation(
        "an-update-is-not-announced",
        "ps",
        "ps",
        "header().begun.store(next, std::memory_order_relaxed);",
        "header().begun.store(next - 1, std::memory_order_relaxed);",
        "a pull has some values of one update and some of the next",
        ("unit/test_ps_blocks.py",),
    ),
    CppMutation(
        "frames-overtake-those-that-wait",
        "ps",
        "ps",
        "if (line.unsent.empty() && line.mate.to_it.put(chunks, n)) {",
        "if (line.mate.to_it.put(chunks, n)) {",
        "a push is applied before one that was made before it, or is taken for one that came twice",
        ("unit/test_ps_wire.py", "unit/test_ps_promises.py"),
        stress=(("post", "300"),),
    ),
    CppMutation(
        "pushes-overtake-what-is-pythons",
        "ps",
        "ps",
        "line.is_held = has_news = true;",
        "has_news = true;",
        "a push is applied before a restore that was asked for before it",
        ("unit/test_ps_promises.py", "unit/test_ps_rebalance.py", "unit/test_ps_tables.py"),
        stress=(("post", "300"),),
    ),
    CppMutation(
        "a-push-counts-twice",
        "ps",
        "ps",
        "if (last.has(header.incarnation, header.sequence)) return true;",
        "if (last.has(header.incarnation, header.sequence) && steps == 0) return true;",
        "a push that comes twice is applied twice",
        ("unit/test_ps_promises.py",),
    ),
    CppMutation(
        "a-pipe-forgets-the-rest-of-its-ring",
        "ps",
        "shm",
        "if (taken + (wraps ? rest : 0) + size_of(nbytes) > capacity_) return false;",
        "if (taken + size_of(nbytes) > capacity_) return false;",
        "a request overwrites one that has not been read",
        ("unit/test_ps_wire.py", "unit/test_ps_promises.py"),
        stress=(("post", "300"),),
    ),
]
