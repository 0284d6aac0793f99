//! Which servers there are, and where their programs lie.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

/// A server to test on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The system's, from the `PATH`: 7.0 on Debian 12, the oldest that is supported.
    Redis70,
    Redis74,
    Valkey8,
    Valkey9,
}

/// The program of a server.
#[derive(Clone, Debug)]
pub(crate) struct Binary {
    kind: Kind,
    path: PathBuf,
    environment: Vec<(String, String)>,
}

impl Kind {
    pub(crate) const ALL: [Self; 4] = [Self::Redis70, Self::Redis74, Self::Valkey8, Self::Valkey9];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Redis70 => "redis70",
            Self::Redis74 => "redis74",
            Self::Valkey8 => "valkey8",
            Self::Valkey9 => "valkey9",
        }
    }

    /// The variable that can tell where the program is.
    fn variable(self) -> String {
        format!("FAIRQ_{}", self.name().to_uppercase())
    }

    fn program(self) -> &'static str {
        match self {
            Self::Redis70 | Self::Redis74 => "redis-server",
            Self::Valkey8 | Self::Valkey9 => "valkey-server",
        }
    }

    fn find(self) -> Option<PathBuf> {
        if let Some(path) = env::var_os(self.variable()) {
            return Some(path.into());
        }
        let places = match self {
            Self::Redis70 => env::split_paths(&env::var_os("PATH")?).collect(),
            _ => vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("target/servers").join(self.name())],
        };
        places.into_iter().map(|place| place.join(self.program())).find(|path| path.is_file())
    }
}

/// The server's program. Where there is none a test has nothing to run on: that is a failure in CI and said elsewhere.
pub(crate) fn require(kind: Kind) -> Option<Binary> {
    if let Some(path) = kind.find() {
        return Some(Binary { kind, path, environment: vec![] });
    }
    let text =
        format!("no server {}: scripts/test installs it, or {} names it", kind.name(), kind.variable());
    assert!(env::var_os("CI").is_none(), "{text}");
    eprintln!("skipped: {text}");
    None
}

impl Binary {
    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// The same program with a variable of the environment.
    pub(crate) fn with_env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The libraries that the system may lack lie beside the program.
    pub(super) fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        if let Some(libraries) =
            self.path.parent().map(|folder| folder.join("lib")).filter(|path| path.is_dir())
        {
            command.env("LD_LIBRARY_PATH", libraries);
        }
        command
    }
}
