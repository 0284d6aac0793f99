-- The fair order, as `schedule` has it: a line per flow, tags at the head, virtual time per level of priority.
--
-- LINES    members flow arrival cost weight level node ticket, all scores 0: a flow's tickets in order of arrival
-- TICKETS  node ticket -> flow arrival cost weight level
-- FLOWS    flow -> what is kept of it while it waits or, with a cap, runs
-- HEADS    members arrival flow by score: the heads that compete
--
-- What a call changes is kept in tables and written at its end, each table in one command.


local FLOW, NO_HEAD = '>BddI2I2ddI2c39', string.rep('\0', 39)

groups[#groups + 1] = function()
    function q.unpack_flow(f)
        f.running, f.start, f.start_rest, f.start_weight, f.read, f.at = 0, 0, 0, 0, {}, 1
        local packed = f.packed
        if packed then
            local has_head, head, score, tag, tag_rest
            has_head, f.running, f.start, f.start_rest, f.start_weight, score, tag, tag_rest, head =
                unpack_from(FLOW, packed)
            f.packed = nil
            if has_head == 1 then
                local cost, weight, level = unpack_from('>I4I2B', head, 9)
                f.head, f.score, f.tag, f.tag_rest, f.in_heads = head, score, tag, tag_rest, true
                f.cost, f.weight, f.level = cost, weight, level + 1
                f.seen = head -- the line is read from behind its head
            end
        end
        return f
    end

    -- A flow as it is stored: enough for whoever joins a line that has a head.
    function q.look_at_flow(id)
        local f = flows[id]
        if not f then
            local packed = call('HGET', FLOWS, id)
            f = { id = id, packed = packed, stored = packed and true }
            flows[id] = f
        end
        return f
    end

    function q.read_flow(id)
        local f = q.look_at_flow(id)
        return f.read and f or q.unpack_flow(f)
    end

    function q.read_flows(ids) -- many at once, none of them twice
        if #ids > 0 then
            local packed = call('HMGET', FLOWS, unpack(ids))
            for i = 1, #ids do
                local id = ids[i]
                flows[id] = { id = id, packed = packed[i], stored = packed[i] and true }
            end
        end
    end

    function q.line_length(f)
        if not f.count then
            f.count = call('ZLEXCOUNT', LINES, '[' .. f.id, '(' .. f.id .. '\255') - (f.left or 0)
        end
        return f.count
    end

    function q.head_start(level)
        return (level - 1) * st.step * SCALE
    end

    function q.level_time(level)
        local time, own = 0, q.head_start(level)
        for r = 1, 8 do
            if reached[r] then
                time = max(time, reached[r] + min(q.head_start(r), own))
            end
        end
        return time
    end

    function q.level_start(level)
        local start = q.level_time(level)
        for r = 1, level do
            if competing[r] > 0 then
                return start
            end
        end
        local above
        for r = level + 1, 8 do
            if competing[r] > 0 then
                local time = q.level_time(r)
                above = above and min(above, time) or time
            end
        end
        if above and above > start then
            reached[level] = above - q.head_start(level)
            return above
        end
        return start
    end

    -- The heads: those read from HEADS, in order, and those that are new in this call, in a heap.

    local stored_heads, next_stored, all_read, gone_heads, fresh = {}, 1, false, {}, {}

    function q.before(a, b)
        return a.score < b.score or (a.score == b.score and a.arrival < b.arrival)
    end

    function q.push_head(f)
        local item, i = { score = f.score, arrival = sub(f.head, 1, 8), flow = f }, #fresh + 1
        f.item = item
        while i > 1 do
            local parent = floor(i / 2)
            if not q.before(item, fresh[parent]) then
                break
            end
            fresh[i], i = fresh[parent], parent
        end
        fresh[i] = item
    end

    function q.pop_head()
        local item = remove(fresh)
        local n, i = #fresh, 1
        if n == 0 then
            return
        end
        while true do
            local child = 2 * i
            if child > n then
                break
            end
            if child < n and q.before(fresh[child + 1], fresh[child]) then
                child = child + 1
            end
            if not q.before(fresh[child], item) then
                break
            end
            fresh[i], i = fresh[child], child
        end
        fresh[i] = item
    end

    function q.first_head()
        local item = fresh[1]
        while item and item.flow.item ~= item do
            q.pop_head()
            item = fresh[1]
        end
        while true do
            if next_stored > #stored_heads and not all_read then
                local n, ids = #stored_heads, {}
                local want = min(2 * n + 2, 64)
                local more = call('ZRANGE', HEADS, n, n + want - 1, 'WITHSCORES')
                for i = 1, #more, 2 do
                    local member = more[i]
                    local id = sub(member, 9)
                    stored_heads[#stored_heads + 1] =
                        { member = member, arrival = sub(member, 1, 8), score = tonumber(more[i + 1]), flow = id }
                    if not flows[id] then
                        ids[#ids + 1] = id
                    end
                end
                q.read_flows(ids)
                all_read = #more < 2 * want
            end
            local stored = stored_heads[next_stored]
            if not stored then
                return item and item.flow
            end
            if not gone_heads[stored.member] then
                if item and q.before(item, stored) then
                    return item.flow
                end
                return q.read_flow(stored.flow)
            end
            next_stored = next_stored + 1
        end
    end

    function q.withdraw(f)
        if not f.head then
            return
        end
        if f.in_heads then
            gone_heads[sub(f.head, 1, 8) .. f.id] = true
            f.in_heads = false
        end
        competing[f.level] = competing[f.level] - 1
        st.heads, st.active = st.heads - 1, st.active - f.weight
        f.head, f.item = nil, nil
        flows_touched[f.id] = f
    end

    -- The line of a flow behind what this call has taken from it.

    local left_tickets, left_lines = {}, {}

    function q.first_in_line(f)
        while true do
            local tail = f.read[f.at]
            if not tail then
                if f.complete then
                    return
                end
                local from = f.seen and '(' .. f.id .. f.seen or '[' .. f.id
                local want = min(#f.read * 2 + 1, 128)
                local members = call('ZRANGEBYLEX', LINES, from, '(' .. f.id .. '\255', 'LIMIT', 0, want)
                f.complete, f.read, f.at = #members < want, {}, 1
                for i = 1, #members do
                    f.read[i] = sub(members[i], 17)
                end
                tail = f.read[1]
                if not tail then
                    return
                end
            end
            f.seen = tail
            if not gone_tickets[sub(tail, 16)] then
                return tail
            end
            f.at = f.at + 1
        end
    end

    function q.read_anew(f) -- its line has changed other than at its ends
        f.read, f.at, f.complete, f.seen = {}, 1, false, nil
    end

    function q.compete(f, since, since_rest, since_weight, before_level)
        flows_touched[f.id] = f
        local head = q.first_in_line(f)
        if head then
            local cost, weight, level = unpack_from('>I4I2B', head, 9)
            level = level + 1
            local units = q.clamp(cost)
            if f.running + units <= st.flow_cap then
                local start, rest, rest_weight = since, since_rest, since_weight
                if not since or level > before_level then
                    local from = q.level_start(level)
                    if not since or start < from then
                        start, rest, rest_weight = from, 0, 0
                    end
                end
                local dividend = units * SCALE + (weight == rest_weight and rest or 0)
                f.start, f.start_rest, f.start_weight = start, rest, rest_weight
                f.tag_rest = dividend % weight
                f.tag = start + (dividend - f.tag_rest) / weight
                f.head, f.score, f.cost, f.weight, f.level = head, f.tag - q.head_start(level), cost, weight, level
                q.push_head(f)
                competing[level] = competing[level] + 1
                st.heads, st.active = st.heads + 1, st.active + weight
            end
        end
        if st.heads == 0 then
            reached = {}
        end
    end

    function q.take_from_line(f, tail)
        local key = sub(tail, 16)
        st.waiting = st.waiting - 1
        if f.count then
            f.count = f.count - 1
        else
            f.left = (f.left or 0) + 1
        end
        gone_tickets[key] = true
        left_tickets[#left_tickets + 1] = key
        left_lines[#left_lines + 1] = f.id .. tail
        flows_touched[f.id] = f
        q.add_waiting(sub(key, 1, 16), -1)
    end

    function q.leave_line(f, tail)
        local first = f.head or q.first_in_line(f)
        q.take_from_line(f, tail)
        if first ~= tail then
            return
        end
        if f.head then
            local start, rest, weight, level = f.start, f.start_rest, f.start_weight, f.level
            q.withdraw(f)
            q.compete(f, start, rest, weight, level)
        else
            q.compete(f)
        end
    end

    function q.is_live(node)
        local live = living[node]
        if live == nil then
            local lease_end = call('ZSCORE', NODES, 'N' .. node)
            live = lease_end and tonumber(lease_end) > st.clock or false
            living[node] = live
        end
        return live
    end

    function q.cancel(key, packed) -- a waiting ticket
        q.leave_line(q.read_flow(sub(packed, 1, 16)), sub(packed, 17) .. key)
    end

    function q.find_permit(key) -- `key`: node and ticket
        return call('ZRANGEBYLEX', PERMITS, '[' .. key, '(' .. key .. '\255\255\255\255\255', 'LIMIT', 0, 1)[1]
    end

    -- Ends of tickets: one that waits leaves its line, one that was granted gives its units back, any other is nothing.
    function q.finish_all(keys)
        if #keys == 0 then
            return
        end
        for i, packed in ipairs(call('HMGET', TICKETS, unpack(keys))) do
            local member = not packed and q.find_permit(keys[i])
            if packed then
                if not gone_tickets[keys[i]] then
                    q.cancel(keys[i], packed)
                end
            elseif member then
                call('ZREM', PERMITS, member)
                q.give_units(member)
            end
        end
    end

    function q.stand_in_line(f, ticket, key, arrival, ask)
        local n = #new_tickets
        st.waiting = st.waiting + 1
        if f.count then
            f.count = f.count + 1
        end
        new_tickets[n + 1], new_tickets[n + 2] = key, f.id .. arrival .. ask
        q.add_waiting(me, 1)
        places[#places + 1] = ticket .. arrival
    end

    function q.has_line(f)
        return f.head or ((f.stored or f.lined) and q.first_in_line(f))
    end

    function q.join_line(f, ticket, ask)
        local arrival, key, n = q.arrive(), me .. ticket, #new_lines
        local tail = arrival .. ask .. key
        q.stand_in_line(f, ticket, key, arrival, ask)
        new_lines[n + 1], new_lines[n + 2] = 0, f.id .. tail
        if not f.read then
            if byte(f.packed or '\0') == 1 then
                return -- it stands behind a head, and nothing else changes
            end
            q.unpack_flow(f)
        end
        if not q.has_line(f) then
            f.read, f.at, f.complete, f.seen, f.lined = { tail }, 1, true, nil, true
            q.compete(f)
        elseif f.complete then
            f.read[#f.read + 1] = tail
        end
    end

    function q.write_tickets()
        if #new_lines > 0 then
            q.call_many('ZADD', LINES, new_lines)
            new_lines = {}
        end
        if #new_tickets > 0 then
            q.call_many('HSET', TICKETS, new_tickets)
            new_tickets = {}
        end
    end

    function q.dispatch()
        while granted < grants_left do
            local f = q.first_head()
            if not f then
                return false
            end
            local tail = f.head
            local node, ticket = sub(tail, 16, 31), sub(tail, 32)
            local units = q.clamp(f.cost)
            if not q.is_live(node) then
                q.leave_line(f, tail)
                granted = granted + 1
            elseif st.too_wide == 1 and f.cost > q.widest() then
                q.leave_line(f, tail)
                q.tell(node, ticket, 0)
                granted = granted + 1
            elseif st.in_flight + units > open then
                return false
            elseif f.running + units > st.flow_cap then
                q.withdraw(f)
                q.read_anew(f)
                q.compete(f)
            else
                local score, level, weight, tag, tag_rest = f.score, f.level, f.weight, f.tag, f.tag_rest
                q.withdraw(f)
                reached[level] = reached[level] and max(reached[level], score) or score
                q.take_from_line(f, tail)
                q.tell(node, ticket, units, q.take_units(f, node, ticket, units))
                q.compete(f, tag, tag_rest, weight, level)
                granted = granted + 1
            end
        end
        return q.first_head() ~= nil and st.in_flight < open
    end

    function q.save_order()
        if #left_lines > 0 then
            q.call_many('ZREM', LINES, left_lines)
            q.call_many('HDEL', TICKETS, left_tickets)
        end
        local members, scored, packed, empty = {}, {}, {}, {}
        for member in pairs(gone_heads) do
            members[#members + 1] = member
        end
        for id, f in pairs(flows_touched) do
            if f.head and not f.in_heads then
                scored[#scored + 1] = q.text(f.score)
                scored[#scored + 1] = sub(f.head, 1, 8) .. id
            end
            if f.head or f.running > 0 then -- a line without a head is that of a flow at its cap
                packed[#packed + 1] = id
                packed[#packed + 1] = pack(FLOW, f.head and 1 or 0, f.running, f.start, f.start_rest, f.start_weight, f.score or 0,
                    f.tag or 0, f.tag_rest or 0, f.head or NO_HEAD)
                if not f.stored then
                    st.flows = st.flows + 1
                end
            elseif f.stored then
                empty[#empty + 1] = id
                st.flows = st.flows - 1
            end
        end
        if #members > 0 then
            q.call_many('ZREM', HEADS, members)
        end
        if #scored > 0 then
            q.call_many('ZADD', HEADS, scored)
        end
        if #packed > 0 then
            q.call_many('HSET', FLOWS, packed)
        end
        if #empty > 0 then
            q.call_many('HDEL', FLOWS, empty)
        end

        local by = 0
        for level = 1, 8 do
            by = max(by, reached[level] or 0)
        end
        if by > REBASE_AT then
            q.rebase(by)
        end
    end
end
