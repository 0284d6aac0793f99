-- What silent nodes held.

groups[#groups + 1] = function()
    function q.forget_node(node)
        known[node], touched[node] = false, nil
        st.calls = st.calls - call('HDEL', CALLS, node)
    end

    function q.forget_outbox(node)
        st.outbox = st.outbox - call('ZREMRANGEBYLEX', OUTBOX, '[' .. node, '(' .. node .. '\255')
    end

    function q.die(node) -- first the entry, so that it can do nothing more, then what it held, in portions
        st.nodes = st.nodes - call('ZREM', NODES, 'N' .. node) + call('ZADD', NODES, 0, 'D' .. node)
        st.live, st.membership = st.live - 1, st.membership + 1
        living[node], st.expiry = false, 0
        local entry = q.read_node(node)
        if entry then
            entry.live = 0
            q.write_node(node)
        end
    end

    function q.reap() -- what silent nodes held, in bounded portions
        local left, more = REAP, false
        for _, member in ipairs(call('ZRANGEBYSCORE', NODES, '-inf', q.text(st.clock), 'LIMIT', 0, 16)) do
            local kind, node = sub(member, 1, 1), sub(member, 2)
            if kind == 'T' then
                st.nodes = st.nodes - call('ZREM', NODES, member)
                q.forget_node(node)
            else
                if kind == 'N' then
                    q.die(node)
                end
                local held = call('ZRANGEBYLEX', PERMITS, '[' .. node, '(' .. node .. '\255', 'LIMIT', 0, left + 1)
                local whole = #held <= left
                if not whole then
                    remove(held)
                end
                if #held > 0 then
                    call('ZREM', PERMITS, unpack(held))
                    for _, permit in ipairs(held) do
                        q.give_units(permit)
                    end
                    left = left - #held
                end
                local entry = q.read_node(node)
                if whole and (not entry or entry.waiting == 0) then
                    q.forget_outbox(node)
                    st.nodes = st.nodes - call('ZREM', NODES, 'D' .. node)
                    if entry and not call('ZSCORE', NODES, 'T' .. node) then
                        q.forget_node(node)
                    end
                else
                    more = true
                end
            end
        end
        local first = call('ZRANGE', NODES, 0, 0, 'WITHSCORES')[2]
        st.expiry = tonumber(first or 0)
        if not more then
            return false
        end
        local scan = call('HSCAN', TICKETS, q.text(st.cursor), 'COUNT', SWEEP)
        st.cursor = tonumber(scan[1])
        for i = 1, #scan[2], 2 do
            local key, packed = scan[2][i], scan[2][i + 1]
            if not gone_tickets[key] and not q.is_live(sub(key, 1, 16)) then
                q.cancel(key, packed)
            end
        end
        return true
    end
end
