// Unit tests of parts of the bounded all_reduce: packets, error feedback, rate controller, UDP
// socket. Usage, by test_fsccl_datagram.py:
//   units_test packets|error-feedback|rate-controller|socket <seed>
#include <chrono>
#include <limits>
#include <random>

#include "datagram/error_feedback.h"
#include "datagram/rate_controller.h"
#include "datagram/socket.h"
#include "simulated_network.h"

namespace {

using namespace fsccl;
using namespace fsccl::datagram;

// A packet is rejected if any bit of it is changed, if it is truncated, or if it comes from another
// address, rail or operation.
void test_packets(unsigned seed, size_t length) {
  const Key key{seed, 5};
  const Rail sender = Rail::derive(key, 1, 2, 4), receiver = Rail::derive(key, 1, 0, 4);
  Bytes packet(sizeof(WireHeader) + length, std::byte{7});
  PacketHeader header;
  header.kind = PacketKind::kPart;
  header.operation = 7;
  header.position = 8;
  header.length = static_cast<uint16_t>(length);
  sign_packet(sender, 0, header, 0, packet.data());
  DropCounters counters;
  const auto read = [&](int from, size_t size) {
    return verify_packet(receiver, from, packet.data(), size, 5, &counters);
  };
  expect(read(2, packet.size()).has_value() && counters.total() == 0, "a valid packet is rejected");
  expect(!read(1, packet.size()) && counters.foreign == 1, "packet from another address accepted");
  // The packet is of operation 7. Its low byte identifies it up to a distance of 128 operations.
  for (const uint64_t current_operation :
       {uint64_t{7 + 128}, uint64_t{7 + 129}, uint64_t{7 + 256}}) {
    const auto packet_read =
        verify_packet(receiver, 2, packet.data(), packet.size(), current_operation, &counters);
    expect(packet_read.has_value() == (current_operation == 7 + 128) &&
               (!packet_read || packet_read->operation == 7),
           "packet of an old operation accepted");
  }
  for (size_t size = 0; size < packet.size(); ++size)
    expect(!read(2, size), "truncated packet accepted");
  Bytes too_long = packet;
  too_long.resize(65'000);
  expect(!verify_packet(receiver, 2, too_long.data(), too_long.size(), 5, &counters),
         "packet longer than any accepted");
  for (size_t bit = 0; bit < packet.size() * 8; ++bit) {
    packet[bit / 8] ^= std::byte{1} << (bit % 8);
    expect(!read(2, packet.size()), "bit " + std::to_string(bit) + " does not matter");
    packet[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  const Rail other_rails[] = {Rail::derive(key, 2, 0, 4), Rail::derive({seed, 6}, 1, 0, 4),
                              Rail::derive(key, 1, 1, 4)};
  for (const Rail& other : other_rails) {
    expect(!verify_packet(other, 2, packet.data(), packet.size(), 5, &counters),
           "packet of another rail accepted");
  }
  const BucketLayout layout{1000, 256, 3};
  for (const uint64_t offset : {uint64_t{0}, uint64_t{768}, uint64_t{255}, uint64_t{1024},
                                std::numeric_limits<uint64_t>::max() - 255}) {
    const size_t length = offset == 768 ? 232 : 256;
    const bool fits = offset == 0 || offset == 768;
    expect((layout.piece_at(offset, length) < layout.pieces()) == fits, "out of bounds");
    expect(layout.piece_at(offset, length - 1) == layout.pieces(),
           "piece with another length accepted");
  }
}

void store_float(Bytes* to, size_t i, float x) { std::memcpy(to->data() + 4 * i, &x, 4); }

// The excluded pieces of a gradient are added once to the next gradient of the same bucket, and to
// no other bucket.
void test_error_feedback() {
  const BucketLayout layout{1000, 256, 2};
  Bitmap excluded(layout.pieces());
  excluded.set(1);
  excluded.set(3);
  Bytes gradient(1000), next(1000), other(1000);
  for (size_t i = 0; i < 250; ++i) {
    store_float(&gradient, i, static_cast<float>(i));
    store_float(&next, i, 1000);
  }
  ErrorFeedback residuals;
  const ErrorFeedback::BucketKey bucket{gradient.data(), 1000, DType::kF32};
  const ErrorFeedback::BucketKey another{other.data(), 1000, DType::kF32};
  residuals.store(bucket, gradient.data(), layout, excluded);
  expect(residuals.has(bucket) && !residuals.has(another), "stored for another bucket");
  residuals.add(another, next.data());
  residuals.add(bucket, next.data());
  for (size_t i = 0; i < 250; ++i) {
    const float added = excluded.test(4 * i / 256) ? static_cast<float>(i) : 0;
    float value = 0;
    std::memcpy(&value, next.data() + 4 * i, 4);
    expect(value == 1000 + added, "residual differs");
  }
  residuals.store(bucket, next.data(), layout, Bitmap(layout.pieces()));
  expect(!residuals.has(bucket), "residual added twice");
}

// Passes the outcome of an operation of 4 ranks to the controller: on a path of this capacity in
// bytes per second, with these shares of lost packets and excluded pieces, and overruns on one
// host.
void simulate_operation(RateController* controller, double capacity, double lost = 0,
                        double excluded = 0, uint64_t overruns = 0) {
  constexpr size_t kBytes = 4 << 20;
  Outcome outcome;
  outcome.excluded = Bitmap(1000);
  for (size_t i = 0; i < static_cast<size_t>(1000 * excluded); ++i) outcome.excluded.set(i);
  RankReport report;
  report.expected = 1000;
  report.lost = static_cast<uint32_t>(1000 * lost);
  const double rate = std::min(controller->rate(), capacity) * (1 - lost);
  report.elapsed_us = static_cast<uint32_t>(1e6 * (1.5 * kBytes / rate + 1e-3));
  outcome.reports.assign(4, report);
  outcome.reports[2].overruns = overruns;
  controller->record_outcome(kBytes, outcome);
}

// Returns a controller that has measured the first operations on a path of this capacity, which
// took `slowdown` times as long as necessary.
RateController make_calibrated_controller(double capacity, double slowdown) {
  RateController controller(4, 1, 0);
  for (size_t i = 0; i < RateController::kExactOperations; ++i) {
    expect(controller.should_use_exact(4 << 20), "not exact although nothing is measured");
    controller.record_exact(
        4 << 20, Time(static_cast<int64_t>(1e9 * slowdown * 1.5 * (4 << 20) / capacity)));
  }
  expect(!controller.should_use_exact(4 << 20), "exact although the rate is measured");
  return controller;
}

void test_rate_controller() {
  constexpr double kCapacity = 30e6;
  const auto expect_rate_near = [&](const RateController& controller, double capacity,
                                    const char* when) {
    const double share = controller.rate() / capacity;
    expect(share > 0.95 && share < 1.5, std::string(when) + ": " + std::to_string(share));
  };
  // The rate converges to the capacity also if the first operations were slow.
  for (const double slowdown : {1.0, 5.0}) {
    RateController controller = make_calibrated_controller(kCapacity, slowdown);
    for (int i = 0; i < 40; ++i) simulate_operation(&controller, kCapacity);
    expect_rate_near(controller, kCapacity, "path");
    // Occasional competing traffic.
    for (int i = 0; i < 6; ++i) simulate_operation(&controller, kCapacity, 0.2);
    expect_rate_near(controller, kCapacity, "with competing traffic");
    for (int i = 0; i < 200; ++i) simulate_operation(&controller, kCapacity / 4);
    expect_rate_near(controller, kCapacity / 4, "a path that became slower");
    for (int i = 0; i < 200; ++i) simulate_operation(&controller, kCapacity);
    expect_rate_near(controller, kCapacity, "a path that became faster again");
    for (int i = 0; i < 40; ++i) simulate_operation(&controller, kCapacity, 0.5);
    expect(controller.rate() < 0.5 * kCapacity, "the rate does not fall although half is lost");
  }
  // A host that can receive at a lower rate than the path, above which it has overruns and few
  // losses.
  RateController slow_host = make_calibrated_controller(2 * kCapacity, 1);
  double total = 0;
  for (int i = 0; i < 600; ++i) {
    const bool above_capacity = slow_host.rate() > kCapacity;
    simulate_operation(&slow_host, 2 * kCapacity, above_capacity ? 0.03 : 0, 0,
                       above_capacity ? 5 : 0);
    if (i >= 300) total += slow_host.rate() / kCapacity / 300;
  }
  expect(total > 0.8 && total < 1.15, "rate with an overloaded host: " + std::to_string(total));
  for (int i = 0; i < 300; ++i) simulate_operation(&slow_host, 2 * kCapacity);
  expect_rate_near(slow_host, 2 * kCapacity, "a host that has recovered");
  // The deadline becomes longer after exclusions, and shorter without.
  RateController controller = make_calibrated_controller(kCapacity, 1);
  AllReduceJob before, more_excluded, none_excluded;
  controller.plan_job(4 << 20, &before);
  for (int i = 0; i < 20; ++i) simulate_operation(&controller, kCapacity, 0.01, 0.1);
  controller.plan_job(4 << 20, &more_excluded);
  for (int i = 0; i < 1000; ++i) simulate_operation(&controller, kCapacity);
  controller.plan_job(4 << 20, &none_excluded);
  expect(
      more_excluded.total_time > before.total_time && none_excluded.total_time < before.total_time,
      "the deadline does not follow the excluded share");
}

// Through the kernel, with and without segmentation offload.
void test_socket(unsigned seed) {
  std::mt19937 random(seed);
  Socket sender("tcp:1:127.0.0.1"), first("tcp:1:127.0.0.1"), second("tcp:1:127.0.0.1");
  const std::vector<std::string> addresses{sender.address(), first.address(), second.address()};
  for (Socket* s : {&sender, &first, &second}) s->set_peers(addresses);
  for (const bool with_segmentation : {true, false}) {
    if (!with_segmentation) {  // the kernel does not segment packets without checksums
      const int on = 1;
      for (int fd = 3; fd < 64; ++fd) setsockopt(fd, SOL_SOCKET, SO_NO_CHECK, &on, sizeof on);
    }
    std::vector<Bytes> sent[3], received[3];
    for (int i = 0; i < 300; ++i) {
      const int to = 1 + static_cast<int>(random() % 2);
      const size_t bytes = random() % 8 == 0 ? sizeof(WireHeader) + random() % 1400 : 1472;
      std::byte* const packet_buffer = sender.reserve(1472);
      std::fill_n(packet_buffer, bytes, static_cast<std::byte>(i));
      const WireHeader wire_header;
      std::memcpy(packet_buffer, &wire_header, sizeof wire_header);
      sent[to].emplace_back(packet_buffer, packet_buffer + bytes);
      sender.send(to, bytes);
      if (i % 50 == 49) {
        sender.flush();
        for (int r : {1, 2}) {
          Socket& socket = r == 1 ? first : second;
          // The kernel delivers them soon, but not at once.
          const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
          while (received[r].size() < sent[r].size() &&
                 std::chrono::steady_clock::now() < deadline) {
            socket.receive([&](int sender_rank, const std::byte* packet, size_t size) {
              expect(sender_rank == 0, "packet of an unknown sender");
              received[r].emplace_back(packet, packet + size);
            });
          }
        }
      }
    }
    for (int r : {1, 2})
      expect(received[r] == sent[r], "rank " + std::to_string(r) + " received other packets");
  }
  expect(sender.refused_packets() == 0, "packets refused");
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const std::string& test = arguments.at(0);
  const auto seed = static_cast<unsigned>(std::stoul(arguments.at(1)));
  if (test == "packets") {
    for (const size_t length : {64, 1024, 1440, 8200}) test_packets(seed, length);
  }
  if (test == "error-feedback") test_error_feedback();
  if (test == "rate-controller") test_rate_controller();
  if (test == "socket") test_socket(seed);
  std::puts("ok");
  return 0;
}
