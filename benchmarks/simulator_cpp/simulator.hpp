// The compiled simulator's loop in plain C++: one step.
//
// Same algorithm and same data layout as rlplace/simulator/fast.py, written as one would write it in C++, to measure what the
// Python compiler costs. The arrays come from the Python side; main.cpp reads them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

struct Task {  // also a row for what exists at the start, and one more that only ends the lists
    int64_t alloc_bytes, free_bytes;
    uint32_t inputs, outputs, group;
};
struct Value {
    int64_t bytes;
    uint32_t readers;
    int32_t table;
    uint32_t source, uses, slots;
};
struct Reader {
    uint32_t task, group;
};
struct Pair {
    double latency_s, bandwidth;
    uint32_t channels, channels_end;
};
struct Device {
    int64_t memory, peak;
    double busy_s;
    uint32_t ready, state;
};
struct Slot {
    uint32_t value, device, uses, blocked, channels, channels_end;
};
struct Event {
    double time_s;
    int64_t key;
    bool operator<(const Event& other) const { return time_s < other.time_s || (time_s == other.time_s && key < other.key); }
};
struct Channel {
    uint32_t head, tail;
};

constexpr uint32_t NONE = 0xFFFFFFFF, OWNED = 1u << 30;  // OWNED: uses of what a group owns, which is never freed
enum Outcome { DONE, CANNOT_RUN, STUCK };

class Simulator {
  public:
    std::vector<double> time_s, table_s;
    std::vector<Task> tasks;
    std::vector<Value> values;
    std::vector<Reader> readers;
    std::vector<Pair> pairs;
    std::vector<uint32_t> column, missing, first, inputs, outputs, owner, channels, rank_of_task, task_of_rank;
    std::vector<int64_t> resident_bytes, reserved_bytes;
    uint32_t num_devices, num_columns, num_channels, width;
    std::vector<Device> devices;  // peaks and busy seconds of the last run
    double step_s;

    void allocate() {
        low_ = (missing.size() + 63) / 64, middle_ = (low_ + 63) / 64, top_ = (middle_ + 63) / 64;
        ready_.resize(num_devices * (low_ + middle_ + top_));
        devices.resize(num_devices), due_.resize(2 * num_devices), waits_.resize(missing.size());
        slots_.resize(readers.size()), following_.resize(readers.size() * width), channel_.resize(num_channels);
        startable_.resize(readers.size() + width), events_.resize(readers.size() + num_devices);
    }

    Outcome run(const uint32_t* device_of_group) {
        reset(device_of_group);
        const int64_t num_tasks = missing.size();
        for (uint32_t task : first) add_ready(device_of_group[tasks[task].group], task);
        double now = 0.0;
        int64_t done = 0, key = num_tasks << 32;  // the first event: the step begins, and what groups own is there
        for (;;) {
            for (;;) {  // everything that ends now
                found_ = 0;
                int64_t number = key >> 32;
                if (number > num_tasks) {
                    end_transfer(key & 0xFFFFFFFF, device_of_group);
                } else {
                    uint32_t device = 0, uses = 0;
                    if (number < num_tasks) {
                        device = device_of_group[tasks[number].group];
                        end_task(number, device);
                        done++;
                    }
                    for (uint32_t i = tasks[number].outputs; i < tasks[number + 1].outputs; i++) {
                        if (number == num_tasks) device = device_of_group[owner[i - tasks[number].outputs]], uses = OWNED;
                        if (!produce(outputs[i], device, uses, device_of_group)) return CANNOT_RUN;
                    }
                }
                for (uint32_t i = 0; i < found_; i++) start_transfer(startable_[i], now);
                if (num_events_ == 0 || events_[0].time_s != now) break;
                key = pop_event();
            }
            for (uint32_t i = 0; i < waiting_; i++)
                if (!start_task(due_[i], now)) return CANNOT_RUN;
            waiting_ = 0;
            if (num_events_ == 0) break;
            now = events_[0].time_s;
            key = pop_event();
        }
        step_s = now;
        return done == num_tasks ? DONE : STUCK;
    }

  private:
    std::vector<uint32_t> waits_, following_, startable_, due_;
    std::vector<Slot> slots_;
    std::vector<Channel> channel_;
    std::vector<uint64_t> ready_;
    std::vector<Event> events_;
    uint32_t low_, middle_, top_, found_, waiting_, num_events_, used_;
    enum { IDLE, RUNNING, DUE };

    void reset(const uint32_t* device_of_group) {
        for (uint32_t device = 0; device < num_devices; device++) {
            devices[device] = {reserved_bytes[device], 0, 0.0, 0, DUE};
            due_[device] = device;
        }
        for (size_t group = 0; group < resident_bytes.size(); group++)
            devices[device_of_group[group]].memory += resident_bytes[group];
        for (Device& device : devices) device.peak = device.memory;
        for (Channel& channel : channel_) channel.head = NONE;
        std::copy(missing.begin(), missing.end(), waits_.begin());
        std::fill(ready_.begin(), ready_.end(), 0);
        num_events_ = 0, used_ = 0, waiting_ = num_devices;
    }

    // A device's ready tasks are a set of bits by rank, under two levels of bits that say which words are not zero.
    void add_ready(uint32_t device, uint32_t task) {
        uint64_t* bits = &ready_[device * (low_ + middle_ + top_)];
        uint32_t rank = rank_of_task[task];
        bits[rank >> 18] |= 1ull << (rank >> 12 & 63);
        bits[top_ + (rank >> 12)] |= 1ull << (rank >> 6 & 63);
        bits[top_ + middle_ + (rank >> 6)] |= 1ull << (rank & 63);
        devices[device].ready++;
        if (devices[device].state == IDLE) {
            devices[device].state = DUE;
            due_[waiting_++] = device;
        }
    }

    uint32_t take_ready(uint32_t device) {
        uint64_t* bits = &ready_[device * (low_ + middle_ + top_)];
        uint32_t i = 0;
        while (bits[i] == 0) i++;
        uint32_t a = i * 64 + __builtin_ctzll(bits[i]);
        uint32_t b = a * 64 + __builtin_ctzll(bits[top_ + a]);
        uint64_t& word = bits[top_ + middle_ + b];
        uint32_t rank = b * 64 + __builtin_ctzll(word);
        word &= word - 1;
        if (word == 0 && (bits[top_ + a] &= ~(1ull << (b & 63))) == 0) bits[i] &= ~(1ull << (a & 63));
        devices[device].ready--;
        return rank;
    }

    void push_event(Event event) {
        uint32_t i = num_events_++;
        while (i > 0 && event < events_[(i - 1) / 2]) events_[i] = events_[(i - 1) / 2], i = (i - 1) / 2;
        events_[i] = event;
    }

    int64_t pop_event() {
        int64_t key = events_[0].key;
        Event last = events_[--num_events_];
        uint32_t i = 0;
        for (uint32_t child; (child = 2 * i + 1) < num_events_; i = child) {
            if (child + 1 < num_events_ && events_[child + 1] < events_[child]) child++;
            if (last < events_[child]) break;
            events_[i] = events_[child];
        }
        events_[i] = last;
        return key;
    }

    void satisfy(uint32_t task, uint32_t device) {
        if (--waits_[task] == 0) add_ready(device, task);
    }

    void allocate_bytes(Device& device, int64_t bytes) {
        device.memory += bytes;
        device.peak = std::max(device.peak, device.memory);
    }

    bool start_task(uint32_t number, double now) {
        Device& device = devices[number];
        device.state = IDLE;
        if (device.ready == 0) return true;
        uint32_t task = task_of_rank[take_ready(number)];
        device.state = RUNNING;
        double time = time_s[size_t(task) * num_columns + column[number]];
        if (time != time) return false;
        device.busy_s += time;
        allocate_bytes(device, tasks[task].alloc_bytes);
        push_event({now + time, int64_t(task) << 32});
        return true;
    }

    // Frees temporaries, unused outputs, and inputs whose last use this was.
    void end_task(int64_t task, uint32_t device) {
        devices[device].state = DUE;
        due_[waiting_++] = device;
        int64_t freed = tasks[task].free_bytes;
        for (uint32_t i = tasks[task].inputs; i < tasks[task + 1].inputs; i++) {
            Value& value = values[inputs[i]];
            if (value.source == device) {
                if (--value.uses == 0) freed += value.bytes;
                continue;
            }
            uint32_t slot = value.slots;
            while (slots_[slot].device != device) slot++;
            if (--slots_[slot].uses == 0) freed += value.bytes;
        }
        devices[device].memory -= freed;
    }

    // A value is there: its readers here miss one input less, and it queues for the other devices that host a reader.
    bool produce(uint32_t number, uint32_t device, uint32_t uses, const uint32_t* device_of_group) {
        Value& value = values[number];
        uint32_t begin = used_, end = begin;
        for (uint32_t i = value.readers; i < values[number + 1].readers; i++) {
            uint32_t there = device_of_group[readers[i].group];
            if (there == device) {
                uses++;
                satisfy(readers[i].task, device);
                continue;
            }
            uint32_t slot = end;  // the slots of a value are kept sorted by device
            while (slot > begin && slots_[slot - 1].device > there) slot--;
            if (slot > begin && slots_[slot - 1].device == there) {
                slots_[slot - 1].uses++;
                continue;
            }
            for (uint32_t other = end; other > slot; other--) {
                slots_[other].device = slots_[other - 1].device;
                slots_[other].uses = slots_[other - 1].uses;
            }
            slots_[slot].device = there, slots_[slot].uses = 1;
            end++;
        }
        used_ = end;
        value.source = device, value.slots = begin, value.uses = uses + (end - begin);
        for (uint32_t slot = begin; slot < end; slot++) {
            const Pair& pair = pairs[device * num_devices + slots_[slot].device];
            if (pair.bandwidth == 0.0) return false;
            uint32_t behind = 0, node = slot * width;
            for (uint32_t k = pair.channels; k < pair.channels_end; k++, node++) {
                Channel& channel = channel_[channels[k]];
                if (channel.head == NONE)
                    channel.head = slot;
                else
                    following_[channel.tail] = slot, behind++;
                following_[node] = NONE;
                channel.tail = node;
            }
            slots_[slot].value = number, slots_[slot].blocked = behind;
            slots_[slot].channels = pair.channels, slots_[slot].channels_end = pair.channels_end;
            if (behind == 0) startable_[found_++] = slot;
        }
        return true;
    }

    void start_transfer(uint32_t number, double now) {
        const Slot& slot = slots_[number];
        const Value& value = values[slot.value];
        uint32_t at = value.source * num_devices + slot.device;
        double time = value.table < 0 ? pairs[at].latency_s + value.bytes / pairs[at].bandwidth
                                      : table_s[size_t(value.table) * num_devices * num_devices + at];
        allocate_bytes(devices[slot.device], value.bytes);
        push_event({now + time, (int64_t(missing.size()) + 1 + slot.value) << 32 | number});
    }

    // The value is present there; its channels go to the next in their queues.
    void end_transfer(uint32_t number, const uint32_t* device_of_group) {
        uint32_t device = slots_[number].device;
        Value* value = &values[slots_[number].value];
        if (--value->uses == 0) devices[value->source].memory -= value->bytes;
        for (uint32_t i = value[0].readers; i < value[1].readers; i++)
            if (device_of_group[readers[i].group] == device) satisfy(readers[i].task, device);
        uint32_t node = number * width;
        for (uint32_t k = slots_[number].channels; k < slots_[number].channels_end; k++, node++) {
            uint32_t heir = following_[node];
            channel_[channels[k]].head = heir;
            if (heir == NONE || --slots_[heir].blocked > 0) continue;
            uint32_t i = found_++;  // several start in the order in which they joined, which is that of their numbers
            for (; i > 0 && startable_[i - 1] > heir; i--) startable_[i] = startable_[i - 1];
            startable_[i] = heir;
        }
    }
};
