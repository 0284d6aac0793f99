//! A client of a few lines, so that what the tests see does not depend on the client under test.

use std::{
    fmt,
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

/// A connection. It blocks, but never longer than a limit.
#[derive(Debug)]
pub(crate) struct Resp(BufReader<TcpStream>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Nil,
    Number(i64),
    Text(String),
    Error(String),
    List(Vec<Self>),
}

impl Resp {
    pub(crate) fn connect(port: u16) -> io::Result<Self> {
        let limit = Duration::from_secs(2);
        let stream = TcpStream::connect_timeout(&SocketAddr::from(([127, 0, 0, 1], port)), limit)?;
        stream.set_read_timeout(Some(limit))?;
        stream.set_write_timeout(Some(limit))?;
        stream.set_nodelay(true)?;
        Ok(Self(BufReader::new(stream)))
    }

    pub(crate) fn call(&mut self, args: &[&str]) -> io::Result<Reply> {
        self.send(args)?;
        self.reply()
    }

    pub(crate) fn send(&mut self, args: &[&str]) -> io::Result<()> {
        let mut bytes = format!("*{}\r\n", args.len());
        for arg in args {
            bytes += &format!("${}\r\n{arg}\r\n", arg.len());
        }
        self.0.get_mut().write_all(bytes.as_bytes())
    }

    /// The next reply, or the next message of a subscription.
    pub(crate) fn reply(&mut self) -> io::Result<Reply> {
        let mut line = String::new();
        self.0.read_line(&mut line)?;
        let line = line.strip_suffix("\r\n").ok_or(io::ErrorKind::UnexpectedEof)?;
        let wrong = || io::Error::new(io::ErrorKind::InvalidData, line);
        let (sort, rest) = line.split_at_checked(1).ok_or_else(wrong)?;
        let number = || rest.parse::<i64>().map_err(|_| wrong());
        Ok(match sort {
            "+" => Reply::Text(rest.to_owned()),
            "-" => Reply::Error(rest.to_owned()),
            ":" => Reply::Number(number()?),
            "$" => match usize::try_from(number()?) {
                Err(_) => Reply::Nil,
                Ok(length) => {
                    let mut bytes = vec![0; length + 2];
                    self.0.read_exact(&mut bytes)?;
                    Reply::Text(String::from_utf8_lossy(&bytes[..length]).into_owned())
                }
            },
            "*" => match usize::try_from(number()?) {
                Err(_) => Reply::Nil,
                Ok(length) => Reply::List((0..length).map(|_| self.reply()).collect::<io::Result<_>>()?),
            },
            _ => return Err(wrong()),
        })
    }
}

/// As `redis-cli` prints into a pipe: the items of a list one a line.
impl fmt::Display for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nil => Ok(()),
            Self::Number(number) => write!(f, "{number}"),
            Self::Text(text) | Self::Error(text) => f.write_str(text),
            Self::List(items) => {
                for (index, item) in items.iter().enumerate() {
                    write!(f, "{}{item}", if index == 0 { "" } else { "\n" })?;
                }
                Ok(())
            }
        }
    }
}
