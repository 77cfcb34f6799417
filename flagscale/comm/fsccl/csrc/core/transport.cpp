#include "transport.h"

#include "tcp_device.h"

namespace fsccl {

std::shared_ptr<Device> Device::of_this_process(const Settings& settings) {
  return TcpDevice::of_this_process(settings.tcp);
}

void Transport::wait(const RequestPtr& request, const Deadline& deadline,
                     const std::function<void()>& watch) {
  constexpr std::chrono::milliseconds kNap(100);
  while (!request->finished()) {
    request->sleep(std::min(kNap, deadline.remaining()));
    if (request->finished()) break;
    if (watch) watch();
    if (deadline.passed()) {
      const int who = request->peer;
      const std::string whom = who == kAnySource ? std::string("no rank's message") : name(who);
      throw Error(
          Fault::kTimeout, who,
          whom + (who == kAnySource ? " came" : " did not come") + " within " + deadline.text());
    }
  }
  if (request->failed()) throw *request->error;
}

int Transport::trace(int rank, const Deadline& deadline, const std::function<void()>& watch) {
  for (int hops = 0; hops < ranks() && rank != peers_.rank; ++hops) {
    const RequestPtr asked = ask(rank);
    if (!asked) return rank;
    while (!asked->finished() && !deadline.passed()) {
      asked->sleep(std::min(Deadline::Ms(20), deadline.remaining()));
      watch();
    }
    const int next = asked->finished() ? asked->peer.load() : -1;
    if (next < 0 || next >= ranks() || next == peers_.rank) return rank;
    rank = next;
  }
  return rank;
}

}  // namespace fsccl
