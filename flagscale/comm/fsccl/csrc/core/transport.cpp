#include "transport.h"

#include "tcp_device.h"

namespace fsccl {

std::shared_ptr<Device> Device::of_this_process(const Settings& settings) {
  return TcpDevice::of_this_process(settings.tcp);
}

void Transport::wait(const RequestPtr& request, const Deadline& deadline,
                     const std::function<void()>& poll) {
  constexpr std::chrono::milliseconds kPollInterval(100);
  while (!request->finished()) {
    request->wait_briefly(std::min(kPollInterval, deadline.remaining()));
    if (request->finished()) break;
    if (poll) poll();
    if (deadline.passed()) {
      const int peer = request->peer;
      const std::string subject =
          peer == kAnySource ? std::string("no rank's message") : name(peer);
      throw Error(Fault::kTimeout, peer,
                  subject + (peer == kAnySource ? " came" : " did not come") + " within the timeout of " +
                      deadline.text());
    }
  }
  if (request->failed()) throw *request->error;
}

int Transport::find_straggler(int rank, const Deadline& deadline,
                              const std::function<void()>& poll) {
  for (int hops = 0; hops < ranks() && rank != peers_.rank; ++hops) {
    const RequestPtr query = query_awaited_rank(rank);
    if (!query) return rank;
    while (!query->finished() && !deadline.passed()) {
      query->wait_briefly(std::min(Deadline::Ms(20), deadline.remaining()));
      poll();
    }
    const int next = query->finished() ? query->peer.load() : -1;
    if (next < 0 || next >= ranks() || next == peers_.rank) return rank;
    rank = next;
  }
  return rank;
}

}  // namespace fsccl
